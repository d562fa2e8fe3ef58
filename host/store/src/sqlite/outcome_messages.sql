-- The digest of the message that an idempotency key was used with. Outcomes that were stored before have none.
ALTER TABLE outcomes ADD COLUMN message_digest BLOB;
