-- Several hosts at a time, which only a database on a server has: where each is reached, what it owns and what it has to read
-- again. The host that removes a session.
ALTER TABLE hosts ADD COLUMN url TEXT NOT NULL DEFAULT '';
ALTER TABLE hosts ADD COLUMN facts TEXT NOT NULL DEFAULT '{}';
ALTER TABLE erasures ADD COLUMN maker INTEGER;
CREATE TABLE session_owners (
    agent   TEXT NOT NULL,
    session TEXT NOT NULL,
    host    INTEGER NOT NULL,
    epoch   INTEGER NOT NULL,
    PRIMARY KEY (agent, session)
) WITHOUT ROWID;
CREATE INDEX session_owners_by_host ON session_owners (host);
CREATE TABLE notices (
    kind    TEXT PRIMARY KEY,
    version INTEGER NOT NULL
) WITHOUT ROWID;
