//! The operator's settings for stored responses.

use std::time::Duration;

/// Bounds of the stored responses.
#[derive(Clone, Debug)]
pub struct ResponseOptions {
    /// Retention of responses, from their creation.
    pub retention: Duration,
    /// Maximum size of all stored responses.
    pub max_stored_bytes: u64,
}

impl Default for ResponseOptions {
    fn default() -> Self {
        ResponseOptions { retention: Duration::from_secs(30 * 24 * 3600), max_stored_bytes: 1 << 30 }
    }
}
