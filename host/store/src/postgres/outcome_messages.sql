-- The digest of the message that an idempotency key was used with. Outcomes of hosts of the version before have none.
ALTER TABLE outcomes ADD COLUMN message_digest BYTEA;
