//! How much work a replica has, in tokens, exact from the moment at which a request is sent to it.
//!
//! A request counts from its placement on, on the caller's thread, so a burst of requests sees what its own first ones
//! have already put on a replica. The engine loop then lowers the request's share as its prompt is computed.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::Priority;

#[derive(Debug, Default)]
pub(crate) struct ReplicaLoad {
    prefill_tokens: AtomicUsize,
    sequences: AtomicUsize,
    background: AtomicUsize,
}

impl ReplicaLoad {
    /// Prompt tokens that are still to be computed, queued ones included.
    pub fn prefill_tokens(&self) -> usize {
        self.prefill_tokens.load(Relaxed)
    }

    /// Sequences that run or wait.
    pub fn sequences(&self) -> usize {
        self.sequences.load(Relaxed)
    }

    /// Those of them that make room for the others.
    pub fn background_sequences(&self) -> usize {
        self.background.load(Relaxed)
    }
}

/// What one request adds to the load of its replica; gone when dropped.
#[derive(Debug)]
pub(crate) struct LoadShare {
    load: Arc<ReplicaLoad>,
    prefill_tokens: usize,
    priority: Priority,
}

impl LoadShare {
    pub fn take(load: &Arc<ReplicaLoad>, prefill_tokens: usize, priority: Priority) -> Self {
        load.sequences.fetch_add(1, Relaxed);
        if priority == Priority::Background {
            load.background.fetch_add(1, Relaxed);
        }
        load.prefill_tokens.fetch_add(prefill_tokens, Relaxed);
        LoadShare { load: load.clone(), prefill_tokens, priority }
    }

    /// So many tokens are still to be computed before the next one can be sampled.
    pub fn set(&mut self, prefill_tokens: usize) {
        // Wrapping addition of the difference, so that the total never passes through a wrong value.
        let change = prefill_tokens.wrapping_sub(self.prefill_tokens);
        self.load.prefill_tokens.fetch_add(change, Relaxed);
        self.prefill_tokens = prefill_tokens;
    }
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        self.set(0);
        if self.priority == Priority::Background {
            self.load.background.fetch_sub(1, Relaxed);
        }
        self.load.sequences.fetch_sub(1, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_add_up_shrink_and_go() {
        let load = Arc::new(ReplicaLoad::default());
        let mut first = LoadShare::take(&load, 100, Priority::Interactive);
        let second = LoadShare::take(&load, 30, Priority::Background);
        first.set(40);
        assert_eq!((load.prefill_tokens(), load.sequences(), load.background_sequences()), (70, 2, 1));
        first.set(90);
        drop(second);
        assert_eq!((load.prefill_tokens(), load.sequences(), load.background_sequences()), (90, 1, 0));
        drop(first);
        assert_eq!((load.prefill_tokens(), load.sequences()), (0, 0));
    }
}
