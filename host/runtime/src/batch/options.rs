//! What the operator decides about batches.

use std::time::Duration;

/// Bounds of the queue.
#[derive(Clone, Debug)]
pub struct BatchOptions {
    /// Items that run at once, of all batches.
    pub max_running: usize,
    /// Of one batch.
    pub max_items: usize,
    /// Requests and results of all batches that are stored.
    pub max_stored_bytes: u64,
    /// Batches that are stored, those that ended included.
    pub max_batches: u64,
    /// How long the results of a batch are kept.
    pub retention: Duration,
    /// An item that failed so often is given up.
    pub max_attempts: u32,
    /// Before the second attempt; each further one waits twice as long.
    pub backoff: Duration,
}

impl Default for BatchOptions {
    fn default() -> Self {
        BatchOptions {
            max_running: 8,
            max_items: 10_000,
            max_stored_bytes: 256 << 20,
            max_batches: 1_000,
            retention: Duration::from_secs(24 * 3600),
            max_attempts: 3,
            backoff: Duration::from_secs(1),
        }
    }
}
