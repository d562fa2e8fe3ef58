-- Responses that clients read again and later requests continue. Deletions of sessions remove those of their turns.
CREATE TABLE responses (
    key           INTEGER PRIMARY KEY AUTOINCREMENT,
    id            TEXT NOT NULL UNIQUE,
    principal     TEXT NOT NULL,
    previous      TEXT,
    thread        TEXT NOT NULL,
    agent         TEXT,
    session       TEXT,
    turn          TEXT,
    created_at_ms INTEGER NOT NULL,
    ended_at_ms   INTEGER,
    state         INTEGER NOT NULL,
    request       BLOB NOT NULL,
    answer        BLOB,
    bytes         INTEGER NOT NULL
);
-- Summed up here, because a sum over all responses would hold up other writes.
CREATE TABLE response_sizes (principal TEXT PRIMARY KEY, bytes INTEGER NOT NULL) WITHOUT ROWID;
CREATE TRIGGER responses_added AFTER INSERT ON responses BEGIN
    INSERT INTO response_sizes VALUES (NEW.principal, NEW.bytes)
        ON CONFLICT (principal) DO UPDATE SET bytes = bytes + excluded.bytes;
END;
CREATE TRIGGER responses_resized AFTER UPDATE OF bytes ON responses BEGIN
    UPDATE response_sizes SET bytes = bytes + NEW.bytes - OLD.bytes WHERE principal = NEW.principal;
END;
CREATE TRIGGER responses_removed AFTER DELETE ON responses BEGIN
    UPDATE response_sizes SET bytes = bytes - OLD.bytes WHERE principal = OLD.principal;
END;
CREATE INDEX responses_by_session ON responses (agent, session) WHERE agent IS NOT NULL;
CREATE INDEX responses_by_age ON responses (created_at_ms);
ALTER TABLE erasures ADD COLUMN response INTEGER NOT NULL DEFAULT 0;
