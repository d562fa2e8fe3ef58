//! The work of a replica in tokens, exact from the moment at which a request is sent to it.
//!
//! A request counts from its placement on, which happens on the caller's thread, so a burst of requests sees
//! the load that its own first requests have already put on a replica. The engine loop then lowers the
//! request's share as its prompt is computed.

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
    /// Returns the number of prompt tokens that are still to be computed, including those of queued requests.
    pub fn prefill_tokens(&self) -> usize {
        self.prefill_tokens.load(Relaxed)
    }

    /// Returns the number of sequences that run or wait.
    pub fn sequences(&self) -> usize {
        self.sequences.load(Relaxed)
    }

    /// Returns how many of these sequences are background work, which makes room for the others.
    pub fn background_sequences(&self) -> usize {
        self.background.load(Relaxed)
    }
}

/// One request's share of the load of its replica. Dropping it removes the share.
#[derive(Debug)]
pub(crate) struct LoadShare {
    load: Arc<ReplicaLoad>,
    prefill_tokens: usize,
    priority: Priority,
}

impl LoadShare {
    /// Adds a request with `prefill_tokens` uncached prompt tokens to the load.
    pub fn take(load: &Arc<ReplicaLoad>, prefill_tokens: usize, priority: Priority) -> Self {
        load.sequences.fetch_add(1, Relaxed);
        if priority == Priority::Background {
            load.background.fetch_add(1, Relaxed);
        }
        load.prefill_tokens.fetch_add(prefill_tokens, Relaxed);
        LoadShare { load: load.clone(), prefill_tokens, priority }
    }

    /// Sets the number of tokens that must be computed before the next one can be sampled.
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
    fn shares_add_up_shrink_and_are_released() {
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
