//! The turns that wait or run in this process.

use super::Feed;
use std::{
    collections::{HashMap, VecDeque, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

/// Number of turns of which the time of the commit is known.
const COMMITS: usize = 1_024;

/// The feeds of all turns that wait or run in this process, by turn id.
#[derive(Default)]
pub(crate) struct LiveTurns {
    feeds: Mutex<HashMap<String, Arc<Feed>>>,
    /// Number of host panics under each turn. Panics are bugs, and rare.
    panics: Mutex<HashMap<String, u32>>,
    /// How long the latest commits took in microseconds, by turn id; the newest is the last.
    commits: Mutex<VecDeque<(String, u64)>>,
}

/// Held while a turn is alive. As long as it exists, nobody else runs the turn or ends it in the
/// store.
pub(crate) struct Live {
    turns: Arc<LiveTurns>,
    id: String,
}

impl LiveTurns {
    /// Registers a turn as alive. Returns `None` if it already is.
    pub(crate) fn enter(self: &Arc<Self>, feed: &Arc<Feed>) -> Option<Arc<Live>> {
        let id = feed.turn_id().to_owned();
        match self.lock().entry(id.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(vacant) => {
                vacant.insert(feed.clone());
                Some(Arc::new(Live { turns: self.clone(), id }))
            }
        }
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
