//! The numbers of agents' log lines that a host remembers, so that not every commit counts all lines of its agent.
//!
//! A host that has just started remembers nothing, so it counts the lines of each agent once. The number of an agent is forgotten
//! when the agent is deleted.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

/// The last counts, by the names of agents. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct LineCounts(Arc<Mutex<HashMap<String, LineCount>>>);

/// The number of an agent's lines when all were counted. Until the next count, it is off by what a transaction has written or
/// removed that was rolled back, and by what other hosts were just writing.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LineCount {
    pub(crate) lines: i64,
    /// The id of the newest of them.
    pub(crate) newest: i64,
}

impl LineCounts {
    pub(crate) fn last(&self, agent: &str) -> Option<LineCount> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(agent).copied()
    }

    pub(crate) fn record(&self, agent: &str, count: LineCount) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).insert(agent.to_owned(), count);
    }

    pub(crate) fn forget(&self, agent: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(agent);
    }
}
