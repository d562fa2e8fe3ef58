//! The advisory locks of hosts, which the server frees when their connection ends.
//!
//! A host that wants the database for itself holds the lock of the schema exclusively, and so does whoever changes the tables.
//! Members of a cluster share it, so they exclude such a host and are excluded by it. Each member also holds a lock of its own
//! number. Others read from the server whether it is held and never try to take it, so they are not in the way of a
//! member that connects again.
//!
//! The common lock belongs to a transaction (see `writer`).

use super::schema;
use sqlx::{AssertSqlSafe, PgConnection, query_scalar};

/// The class of the lock of a schema.
const SCHEMA_CLASS: i32 = 0x736b_6570;
/// The class of the common lock.
const COMMON_CLASS: i32 = 0x736b_6571;
/// The number of the schema.
const SCHEMA: &str = "CAST(to_regnamespace(current_schema()) AS oid)";
const THIS_DATABASE: &str = "database = (SELECT oid FROM pg_database WHERE datname = current_database())";

/// Takes the lock of the schema for this host alone, until its connection ends. Returns whether it was free.
pub(super) async fn take(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    on_schema("pg_try_advisory_lock", connection).await
}

/// Takes the lock of the schema together with others. Returns `false` if a host has it for itself.
pub(super) async fn share(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    on_schema("pg_try_advisory_lock_shared", connection).await
}

/// Gives up the lock that this connection has for itself. Its share remains, if it has one.
pub(super) async fn stop_being_alone(connection: &mut PgConnection) -> Result<(), sqlx::Error> {
    on_schema("pg_advisory_unlock", connection).await.map(drop)
}

async fn on_schema(function: &'static str, connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let sql = format!("SELECT {function}($1, CAST({SCHEMA} AS int))");
    query_scalar(AssertSqlSafe(sql)).bind(SCHEMA_CLASS).fetch_one(connection).await
}

/// Takes the lock of a member's number, until its connection ends. Returns whether it was free.
pub(super) async fn take_own(connection: &mut PgConnection, number: i64) -> Result<bool, sqlx::Error> {
    let sql = format!("SELECT pg_try_advisory_lock((CAST({SCHEMA} AS bigint) << 32) | $1)");
    query_scalar(AssertSqlSafe(sql)).bind(number).fetch_one(connection).await
}

/// Returns the query for the server's process that has the lock of a member. `number` is an expression.
pub(crate) fn holder_of_member(number: &str) -> String {
    format!(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1 AND classid = {SCHEMA}
             AND objid = CAST({number} AS oid) AND {THIS_DATABASE}"
    )
}

/// Returns the query for the server's processes that have the lock of the schema.
pub(super) fn holder() -> String {
    format!(
        "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 2
             AND classid = {SCHEMA_CLASS} AND objid = {SCHEMA} AND {THIS_DATABASE}"
    )
}

/// Returns the statement that tells whether a host has the lock of the schema.
pub(crate) fn has_host() -> String {
    format!("SELECT EXISTS ({})", holder())
}

/// Returns the statement that waits for the common lock, which its transaction then has until it ends.
pub(crate) fn take_common() -> String {
    format!("SELECT pg_advisory_xact_lock({COMMON_CLASS}, CAST({SCHEMA} AS int))")
}

/// Returns whether tables of this database are being created or changed.
pub(super) async fn is_migrating(connection: &mut PgConnection) -> Result<bool, sqlx::Error> {
    let sql = format!(
        "SELECT EXISTS (SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted AND objsubid = 1
             AND classid = 0 AND objid = {} AND {THIS_DATABASE})",
        schema::LOCK
    );
    query_scalar(AssertSqlSafe(sql)).fetch_one(connection).await
}
