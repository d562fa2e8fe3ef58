//! The tables, as a list of steps from one schema version to the next.
//!
//! A step, once released, never changes; a new version appends one. SQLite's `user_version` says how many were taken.

use crate::StoreError;
use sqlx::{SqliteConnection, query, query_scalar};

const STEPS: &[&str] = &[
    "
    CREATE TABLE components (
        digest TEXT PRIMARY KEY,
        bytes  BLOB NOT NULL
    );
    CREATE TABLE agents (
        name           TEXT PRIMARY KEY,
        manifest       TEXT NOT NULL,
        digest         TEXT NOT NULL REFERENCES components(digest),
        deployed_at_ms INTEGER NOT NULL
    );
    CREATE TABLE sessions (
        agent         TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session       TEXT NOT NULL,
        turns         INTEGER NOT NULL,
        created_at_ms INTEGER NOT NULL,
        updated_at_ms INTEGER NOT NULL,
        PRIMARY KEY (agent, session)
    ) WITHOUT ROWID;
    CREATE TABLE state (
        agent   TEXT NOT NULL,
        session TEXT NOT NULL,
        key     TEXT NOT NULL,
        value   BLOB NOT NULL,
        PRIMARY KEY (agent, session, key),
        FOREIGN KEY (agent, session) REFERENCES sessions(agent, session) ON DELETE CASCADE
    );
    CREATE TABLE conversations (
        agent   TEXT NOT NULL,
        session TEXT NOT NULL,
        name    TEXT NOT NULL,
        body    BLOB NOT NULL,
        PRIMARY KEY (agent, session, name),
        FOREIGN KEY (agent, session) REFERENCES sessions(agent, session) ON DELETE CASCADE
    );
    CREATE TABLE outcomes (
        agent           TEXT NOT NULL,
        session         TEXT NOT NULL,
        idempotency_key TEXT NOT NULL,
        turn            INTEGER NOT NULL,
        body            BLOB NOT NULL,
        PRIMARY KEY (agent, session, idempotency_key),
        FOREIGN KEY (agent, session) REFERENCES sessions(agent, session) ON DELETE CASCADE
    );
    CREATE TABLE logs (
        id      INTEGER PRIMARY KEY AUTOINCREMENT,
        agent   TEXT NOT NULL REFERENCES agents(name) ON DELETE CASCADE,
        session TEXT NOT NULL,
        turn    INTEGER NOT NULL,
        at_ms   INTEGER NOT NULL,
        level   TEXT NOT NULL,
        message TEXT NOT NULL
    );
    CREATE INDEX logs_by_agent ON logs (agent, id);
",
    "
    CREATE TABLE artifacts (
        key        TEXT PRIMARY KEY,
        checksum   TEXT NOT NULL,
        bytes      INTEGER NOT NULL,
        used_at_ms INTEGER NOT NULL
    ) WITHOUT ROWID;
",
];

/// Brings a database to the schema that this build knows.
pub(crate) async fn migrate(connection: &mut SqliteConnection) -> Result<(), StoreError> {
    let failed = || StoreError::while_it("brought the schema up to date");
    let known = STEPS.len() as i64;
    let found: i64 =
        query_scalar("PRAGMA user_version").fetch_one(&mut *connection).await.map_err(failed())?;
    if found > known {
        return Err(StoreError::NewerSchema { found, known });
    }
    for (version, step) in STEPS.iter().enumerate().skip(found.max(0) as usize) {
        let script = format!("BEGIN IMMEDIATE; {step} PRAGMA user_version = {}; COMMIT;", version + 1);
        sqlx::raw_sql(sqlx::AssertSqlSafe(script)).execute(&mut *connection).await.map_err(failed())?;
    }
    query("PRAGMA optimize").execute(connection).await.map_err(failed())?;
    Ok(())
}
