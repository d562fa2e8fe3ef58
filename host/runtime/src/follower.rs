//! A reader that follows a stored log, without end and without duplicates. It reads entries from the store and is only woken, so a slow
//! reader costs nothing, and misses only what the store has dropped.

use crate::{RuntimeError, shutdown::Shutdown};
use tokio::sync::watch;

/// A log in the store whose entries have growing positions. A follower holds it, and with it the sender that wakes followers.
pub trait StoredLog: Sync {
    type Entry;

    /// Returns the position of the newest entry.
    fn newest(&self) -> impl Future<Output = Result<i64, RuntimeError>> + Send;

    /// Returns some of the entries after a position.
    fn entries_after(
        &self,
        position: i64,
    ) -> impl Future<Output = Result<LogPage<Self::Entry>, RuntimeError>> + Send;
}

/// Entries of a log, the oldest first.
pub struct LogPage<T> {
    pub(crate) entries: Vec<T>,
    /// The position of the last entry.
    pub(crate) last: Option<i64>,
    /// The position at which the next page begins, if this one ended before the log did.
    pub(crate) next: Option<i64>,
}

/// A position in a log.
pub struct Follower<L> {
    log: L,
    after: i64,
    grown: watch::Receiver<()>,
    shutdown: Shutdown,
}

impl<L: StoredLog> Follower<L> {
    pub(crate) fn new(log: L, after: i64, grown: watch::Receiver<()>, shutdown: Shutdown) -> Self {
        Follower { log, after, grown, shutdown }
    }

    /// Returns the next entries, once there are any.
    pub async fn next(&mut self) -> Result<Vec<L::Entry>, RuntimeError> {
        loop {
            // Entries that are stored from here on wake the follower again.
            self.grown.borrow_and_update();
            let newest = self.log.newest().await?;
            let LogPage { entries, last, next } = self.log.entries_after(self.after).await?;
            // Entries that the filter excludes are skipped for good.
            self.after = next.unwrap_or_else(|| last.map_or(newest, |last| last.max(newest))).max(self.after);
            if !entries.is_empty() {
                return Ok(entries);
            }
            if next.is_some() {
                continue;
            }
            self.grown.changed().await.expect("the follower holds the log, which owns the sender");
            self.shutdown.admit()?;
        }
    }
}
