-- The KV pages that all hosts of a cluster erase.
CREATE TABLE page_erasures (
    number     INTEGER PRIMARY KEY,
    of_tenant  TEXT,
    of_agent   TEXT,
    of_session TEXT,
    host       INTEGER,
    at_ms      INTEGER NOT NULL
);
