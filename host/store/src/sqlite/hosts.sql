-- Hosts, of which only a database on a server lists several; the host that does a piece of work; and the one that has begun
-- to write what is not complete.
CREATE TABLE hosts (
    number        INTEGER PRIMARY KEY AUTOINCREMENT,
    version       TEXT NOT NULL,
    state         INTEGER NOT NULL,
    written       INTEGER NOT NULL,
    seen_at_ms    INTEGER NOT NULL,
    backend       INTEGER NOT NULL,
    started_at_ms INTEGER NOT NULL
);
ALTER TABLE schedules ADD COLUMN host INTEGER;
ALTER TABLE deliveries ADD COLUMN host INTEGER;
ALTER TABLE batch_items ADD COLUMN host INTEGER;
ALTER TABLE batches ADD COLUMN maker INTEGER;
ALTER TABLE files ADD COLUMN maker INTEGER;
ALTER TABLE sessions ADD COLUMN maker INTEGER;
