//! The operator's settings for batches.

use std::time::Duration;

/// Limits of the queue.
#[derive(Clone, Debug)]
pub struct BatchOptions {
    /// Maximum number of items that run at once, over all batches.
    pub max_running: usize,
    /// Maximum number of items in one batch.
    pub max_items: usize,
    /// Maximum size of the stored requests and results of all batches.
    pub max_stored_bytes: u64,
    /// Maximum number of stored batches, including those that ended.
    pub max_batches: u64,
    /// Retention of the results of a batch.
    pub retention: Duration,
    /// Longest retention of the results of a batch whose client's API says how long they are kept.
    pub file_retention: Duration,
    /// An item fails permanently after this many failed attempts.
    pub max_attempts: u32,
    /// Delay before the second attempt. It doubles with each further attempt.
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
            file_retention: Duration::from_secs(30 * 24 * 3600),
            max_attempts: 3,
            backoff: Duration::from_secs(1),
        }
    }
}
