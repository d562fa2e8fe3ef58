//! The turns that wait or run in this process.

use super::Feed;
use crate::cluster::Owned;
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

/// Number of turns of which the time of the commit is known.
const COMMITS: usize = 1_024;

/// The feeds of all turns that wait or run in this process, by turn id.
#[derive(Default)]
pub(crate) struct LiveTurns {
    feeds: Mutex<HashMap<String, Arc<Feed>>>,
    /// The feeds of turns that were sent to other hosts and are followed here, by turn id.
    sent: Mutex<HashMap<String, Vec<Weak<Feed>>>>,
    /// Number of those turns that end with their callers.
    depending: AtomicUsize,
    /// Number of host panics under each turn. Panics are bugs, and rare.
    panics: Mutex<HashMap<String, u32>>,
    /// How long the latest commits took in microseconds, by turn id; the newest is the last.
    commits: Mutex<VecDeque<(String, u64)>>,
}

/// Held while a turn is alive. As long as it exists, nobody else runs the turn or ends it in the
/// store, and the session stays with this host.
pub(crate) struct Live {
    turns: Arc<LiveTurns>,
    id: String,
    session: Owned,
}

/// Held while a turn that was sent to another host is followed here.
pub(crate) struct Sent {
    turns: Arc<LiveTurns>,
    id: String,
    feed: Weak<Feed>,
    ends_with_caller: bool,
}

impl LiveTurns {
    /// Registers a turn of a session of this host as alive. Returns `None` if it already is.
    pub(crate) fn enter(self: &Arc<Self>, feed: &Arc<Feed>, session: Owned) -> Option<Arc<Live>> {
        let id = feed.turn_id().to_owned();
        match self.lock().entry(id.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                vacant.insert(feed.clone());
                Some(Arc::new(Live { turns: self.clone(), id, session }))
            }
        }
    }

    /// Registers a turn that was sent to another host, so that [`LiveTurns::cancel`] finds it. It is not alive here: this host may
    /// take it over while it is followed.
    pub(crate) fn enter_sent(self: &Arc<Self>, feed: &Arc<Feed>, ends_with_caller: bool) -> Sent {
        let id = feed.turn_id().to_owned();
        let mut sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let feed = Arc::downgrade(feed);
        sent.entry(id.clone()).or_default().push(feed.clone());
        self.depending.fetch_add(usize::from(ends_with_caller), Ordering::AcqRel);
        Sent { turns: self.clone(), id, feed, ends_with_caller }
    }

    /// Cancels a turn, if it is alive here or was sent from here to another host.
    pub(crate) fn cancel(&self, id: &str) {
        if let Some(feed) = self.get(id) {
            feed.cancel();
        }
        let sent = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        for feed in sent.get(id).into_iter().flatten().filter_map(Weak::upgrade) {
            feed.cancel();
        }
    }

    /// Returns the number of turns on other hosts that are cancelled if this host ends.
    pub(crate) fn depending(&self) -> usize {
        self.depending.load(Ordering::Acquire)
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Feed>> {
        self.lock().get(id).cloned()
    }

    /// Returns how often a part of the host panicked under a turn.
    pub(crate) fn panics(&self, id: &str) -> u32 {
        let panics = self.panics.lock().unwrap_or_else(PoisonError::into_inner);
        panics.get(id).copied().unwrap_or_default()
    }

    /// Records how long the commit of a turn took, which the commit itself cannot hold.
    pub(crate) fn committed(&self, id: &str, took: Duration) {
        let mut commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        if commits.len() == COMMITS {
            commits.pop_front();
        }
        commits.push_back((id.to_owned(), u64::try_from(took.as_micros()).unwrap_or(u64::MAX)));
    }

    /// Returns how long the commit of a turn took in microseconds, if it is one of the latest.
    pub(crate) fn commit_us(&self, id: &str) -> Option<u64> {
        let commits = self.commits.lock().unwrap_or_else(PoisonError::into_inner);
        commits.iter().rev().find(|(turn, _)| turn == id).map(|(_, took_us)| *took_us)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Feed>>> {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Live {
    /// Returns what keeps the session of the turn with this host.
    pub(crate) fn session(&self) -> &Owned {
        &self.session
    }
}

impl Drop for Sent {
    fn drop(&mut self) {
        self.turns.depending.fetch_sub(usize::from(self.ends_with_caller), Ordering::AcqRel);
        let mut sent = self.turns.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(feeds) = sent.get_mut(&self.id) else { return };
        feeds.retain(|feed| !feed.ptr_eq(&self.feed));
        if feeds.is_empty() {
            sent.remove(&self.id);
        }
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.turns.lock().remove(&self.id);
        if std::thread::panicking() {
            let mut panics = self.turns.panics.lock().unwrap_or_else(PoisonError::into_inner);
            *panics.entry(self.id.clone()).or_default() += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_turn_that_was_sent_elsewhere_is_cancelled_but_not_alive() {
        let live = Arc::<LiveTurns>::default();
        let feed = Feed::new("t".into());
        let other = Feed::new("t".into());
        let (sent, second) = (live.enter_sent(&feed, true), live.enter_sent(&other, false));
        assert!(live.get("t").is_none());
        let taken_over = live.enter(&Feed::new("t".into()), Owned::default());
        assert!(taken_over.is_some(), "this host may take the turn over");
        drop(second);
        live.cancel("t");
        assert!(*feed.cancelled.borrow() && !*other.cancelled.borrow());
        assert_eq!(live.depending(), 1);
        drop(sent);
        assert_eq!(live.depending(), 0);
        live.cancel("t");
    }

    #[test]
    fn the_times_of_the_latest_commits_are_kept() {
        let live = LiveTurns::default();
        for turn in 0..=COMMITS {
            live.committed(&turn.to_string(), Duration::from_micros(turn as u64));
        }
        assert_eq!(live.commit_us("0"), None);
        assert_eq!(live.commit_us("1"), Some(1));
        assert_eq!(live.commit_us(&COMMITS.to_string()), Some(COMMITS as u64));
    }
}
