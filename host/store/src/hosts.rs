//! The hosts that work with one database, and the work that each of them has in hand.
//!
//! A piece of work that has begun names its host, and so does what is written in chunks. It can be taken up by another one only
//! when that host is gone, after which nothing more is written under its number. A host that starts gets a number that no
//! other had, so nothing that it finds is its own. An SQLite file has one host, which has no number: everything that it finds
//! in hand when it starts was left by its last process.
//!
//! A session of a cluster belongs to at most one host, which `session_owners` names. It gets an owner only while it has none
//! that lives, and loses it when the owner releases it or is gone. So a host may remember what it owns, until it releases it.

/// The number of a host in the table `hosts`; `None` for the only host of an SQLite file.
pub(crate) type HostNumber = Option<i64>;

/// The state of a host that may write.
pub(crate) const SERVES: i64 = 1;
/// The state of a host that gives its sessions away. It may still write.
pub(crate) const DRAINS: i64 = 2;
/// The state of a host that writes nothing anymore. It is set only while no transaction of the host is open, because each
/// of them has locked the row.
pub(crate) const GONE: i64 = 3;
/// The time of the server.
pub(crate) const NOW_MS: &str = "CAST(extract(epoch FROM clock_timestamp()) * 1000 AS BIGINT)";

/// Returns the condition that nobody works on a row anymore, whose column `host` names who did.
pub(crate) fn is_left(host: &str) -> String {
    format!("({host} IS NULL OR {host} NOT IN (SELECT number FROM hosts WHERE state != {GONE}))")
}

/// Returns the condition that a host owns the session of a row, whose columns `agent` and `session` name it. `table` is the
/// name of the row's table in the query.
pub(crate) fn is_owned(table: &str, host: i64) -> String {
    is_owned_since(table, host, 0)
}

/// Returns the same condition for sessions that the host owns under this epoch or a later one.
pub(crate) fn is_owned_since(table: &str, host: i64, epoch: i64) -> String {
    format!(
        "EXISTS (SELECT 1 FROM session_owners AS owned WHERE owned.agent = {table}.agent
             AND owned.session = {table}.session AND owned.host = {host} AND owned.epoch >= {epoch})"
    )
}
