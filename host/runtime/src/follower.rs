//! A reader that follows a stored log, without end and without duplicates. It reads entries from the store and is only woken, so a slow
//! reader costs nothing, and misses only what the store has dropped.
//!
//! In a cluster, several hosts write the log. Only those of this host wake the reader, so it also looks every second. Positions are
//! given before the transactions that write the entries are committed, so an entry may appear after others that have later positions.
//! The reader reads the newest part of the log again for a while, and remembers which entries of it were returned.

use crate::{RuntimeError, shutdown::Shutdown};
use std::{
    collections::{BTreeSet, VecDeque},
    time::{Duration, Instant},
};
use tokio::{sync::watch, time::timeout};

/// Interval at which entries of other hosts are looked for.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);
/// Interval at which the newest part of the log is read again.
const AGAIN_INTERVAL: Duration = Duration::from_millis(500);
/// Time within which a transaction is committed that has given a position. An entry of one that takes longer is not returned.
const COMMIT_TIME: Duration = Duration::from_secs(3);
/// Time between two positions of the log that are remembered.
const MARK_INTERVAL: Duration = Duration::from_millis(100);
/// Number of positions before the first one in which entries may appear that nobody has seen.
const BEFORE: i64 = 100;
/// Maximum number of returned entries that are remembered.
const MAX_RETURNED: usize = 10_000;

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

    /// Returns the position of an entry.
    fn position(entry: &Self::Entry) -> i64;

    /// Returns whether other hosts write to the log, too.
    fn has_several_writers(&self) -> bool;
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
    /// The newest part of a log that several hosts write, once it was read.
    recent: Option<Recent>,
}

/// The newest part of a log, in which entries may still appear.
struct Recent {
    /// The position at which this part begins.
    begin: i64,
    /// The positions of the entries that were returned.
    returned: BTreeSet<i64>,
    /// The newest positions of the log at earlier times, the oldest first.
    marks: VecDeque<(Instant, i64)>,
    /// The time at which this part was last read from its beginning to its end.
    read_at: Instant,
}

impl<L: StoredLog> Follower<L> {
    pub(crate) fn new(log: L, after: i64, grown: watch::Receiver<()>, shutdown: Shutdown) -> Self {
        Follower { log, after, grown, shutdown, recent: None }
    }

    /// Returns the next entries, once there are any.
    pub async fn next(&mut self) -> Result<Vec<L::Entry>, RuntimeError> {
        let is_shared = self.log.has_several_writers();
        loop {
            // Entries that are stored from here on wake the follower again.
            self.grown.borrow_and_update();
            let entries = if is_shared { self.look_again().await? } else { self.look().await? };
            if !entries.is_empty() {
                return Ok(entries);
            }
            let changed = self.grown.changed();
            let woken = if is_shared { timeout(LOOK_INTERVAL, changed).await } else { Ok(changed.await) };
            if let Ok(changed) = woken {
                changed.expect("the follower holds the log, which owns the sender");
            }
            self.shutdown.admit()?;
        }
    }

    /// Returns the entries that were not read yet.
    async fn look(&mut self) -> Result<Vec<L::Entry>, RuntimeError> {
        loop {
            let newest = self.log.newest().await?;
            let LogPage { entries, last, next } = self.log.entries_after(self.after).await?;
            // Entries that the filter excludes are skipped for good.
            self.after = next.unwrap_or_else(|| last.map_or(newest, |last| last.max(newest))).max(self.after);
            if !entries.is_empty() || next.is_none() {
                return Ok(entries);
            }
        }
    }

    /// Returns the entries that were not read yet, and from time to time those that have appeared before them.
    async fn look_again(&mut self) -> Result<Vec<L::Entry>, RuntimeError> {
        if self.recent.is_none() {
            self.recent = Some(self.first().await?);
        }
        let newest = self.log.newest().await?;
        let Some(recent) = &mut self.recent else { return Ok(Vec::new()) };
        let now = Instant::now();
        recent.mark(now, newest);
        let is_again = recent.begin < self.after && now.duration_since(recent.read_at) >= AGAIN_INTERVAL;
        let mut position = if is_again { recent.begin } else { self.after };
        loop {
            let LogPage { mut entries, last, next } = self.log.entries_after(position).await?;
            entries.retain(|entry| recent.returned.insert(L::position(entry)));
            let read = next.unwrap_or_else(|| last.map_or(newest, |last| last.max(newest)));
            self.after = self.after.max(read);
            if next.is_none() && is_again {
                recent.settle(now);
            }
            match next {
                Some(next) if entries.is_empty() => position = next,
                _ => {
                    recent.limit();
                    return Ok(entries);
                }
            }
        }
    }

    /// Reads the part of the log before the first position. What is there counts as returned.
    async fn first(&self) -> Result<Recent, RuntimeError> {
        let now = Instant::now();
        let begin = self.after.saturating_sub(BEFORE).max(0);
        let marks = VecDeque::from([(now, self.after)]);
        let mut recent = Recent { begin, returned: BTreeSet::new(), marks, read_at: now };
        let mut position = begin;
        while position < self.after {
            let LogPage { entries, next, .. } = self.log.entries_after(position).await?;
            let before = entries.iter().map(L::position).filter(|position| *position <= self.after);
            recent.returned.extend(before);
            let Some(next) = next else { break };
            position = next;
        }
        Ok(recent)
    }
}

impl Recent {
    /// Remembers the newest position of the log at this time.
    fn mark(&mut self, now: Instant, newest: i64) {
        let is_new = self
            .marks
            .back()
            .is_none_or(|(at, position)| *position < newest && now.duration_since(*at) >= MARK_INTERVAL);
        if is_new {
            self.marks.push_back((now, newest));
        }
    }

    /// Ends the part at the positions that were old enough when it was read, at this time.
    fn settle(&mut self, now: Instant) {
        self.read_at = now;
        while let Some((at, position)) = self.marks.front()
            && now.duration_since(*at) >= COMMIT_TIME
        {
            self.begin = self.begin.max(*position);
            self.marks.pop_front();
        }
        self.returned = self.returned.split_off(&self.begin.saturating_add(1));
    }

    /// Forgets the oldest entries if there are too many.
    fn limit(&mut self) {
        while self.returned.len() > MAX_RETURNED
            && let Some(first) = self.returned.pop_first()
        {
            self.begin = self.begin.max(first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_part_that_is_read_again_ends_where_no_transaction_is_open_any_more() {
        let began = Instant::now();
        let marks = VecDeque::from([(began, 10)]);
        let mut recent = Recent { begin: 0, returned: BTreeSet::from([9, 10]), marks, read_at: began };
        let later = |ms: u64| began + Duration::from_millis(ms);
        recent.mark(later(50), 11);
        recent.mark(later(100), 12);
        recent.mark(later(500), 12);
        assert_eq!(recent.marks.len(), 2, "marks have a distance");
        recent.returned.extend([11, 12]);
        recent.settle(later(2_999));
        assert_eq!((recent.begin, recent.returned.len()), (0, 4));
        recent.settle(later(3_000));
        assert_eq!((recent.begin, recent.returned.len()), (10, 2));
        recent.settle(later(3_100));
        assert_eq!((recent.begin, recent.returned.len()), (12, 0));
        recent.returned.extend(13..=13 + MAX_RETURNED as i64);
        recent.limit();
        assert_eq!((recent.begin, recent.returned.len()), (13, MAX_RETURNED));
    }
}
