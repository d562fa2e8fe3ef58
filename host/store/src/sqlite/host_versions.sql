-- What hosts of a cluster say to each other and know, which a host of the version before does not report; what they have chosen
-- together; and the sessions of their MCP clients, with the host that has each of them. Only a database on a server has a
-- cluster.
ALTER TABLE hosts ADD COLUMN protocol INTEGER NOT NULL DEFAULT 1;
ALTER TABLE hosts ADD COLUMN knows INTEGER NOT NULL DEFAULT 28;
CREATE TABLE choices (
    name  TEXT PRIMARY KEY,
    value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE mcp_sessions (
    id         TEXT PRIMARY KEY,
    tenant     TEXT NOT NULL,
    key        TEXT,
    agent      TEXT,
    state      TEXT NOT NULL,
    host       INTEGER NOT NULL,
    epoch      INTEGER NOT NULL,
    used_at_ms INTEGER NOT NULL
) WITHOUT ROWID;
CREATE INDEX mcp_sessions_by_host ON mcp_sessions (host);
