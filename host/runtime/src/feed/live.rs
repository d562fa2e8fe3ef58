//! The turns that wait or run in this process.

use super::Feed;
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The feeds of all turns that wait or run in this process, by turn id.
#[derive(Default)]
pub(crate) struct LiveTurns {
    feeds: Mutex<HashMap<String, Arc<Feed>>>,
    /// Number of host panics under each turn. Panics are bugs, and rare.
    panics: Mutex<HashMap<String, u32>>,
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
