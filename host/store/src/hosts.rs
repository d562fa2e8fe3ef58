//! The hosts that work with one database, and the work that each of them has in hand.
//!
//! A piece of work that has begun names its host. It can be taken up by another one only when that host is gone, after which
//! nothing more is written under its number. An SQLite file has one host, which has no number: everything that it finds in
//! hand when it starts was left by its last process.

/// The number of a host in the table `hosts`; `None` for the only host of an SQLite file.
pub(crate) type HostNumber = Option<i64>;

/// The state of a host that writes nothing any more.
pub(crate) const GONE: i64 = 3;

/// Returns the condition that nobody works on a row any more, whose column `host` names who did.
pub(crate) fn is_left(host: &str) -> String {
    format!("({host} IS NULL OR {host} NOT IN (SELECT number FROM hosts WHERE state != {GONE}))")
}

/// Returns the condition that a row was in hand before this host started: nobody works on it, or it names this host, which
/// is the parameter `own`.
pub(crate) fn is_left_at_start(host: &str, own: &str) -> String {
    format!("({} OR {host} = {own})", is_left(host))
}
