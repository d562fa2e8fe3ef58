//! `[batch]` and `[responses]` in `skep.toml`: limits of what is processed or kept for clients.

use std::time::Duration;

use serde::Deserialize;
use skep_runtime::{BatchOptions, ResponseOptions};

use crate::number::number;

/// The section `[batch]`: the queue of asynchronous requests.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BatchConfig {
    /// Maximum number of requests that run at once, across all batches.
    #[serde(deserialize_with = "number::<1, 100_000, _, _>")]
    pub max_running: Option<usize>,
    /// Maximum number of requests in one batch.
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub max_items: Option<usize>,
    /// Maximum number of batches that are kept, including finished ones.
    #[serde(deserialize_with = "number::<1, 1_000_000, _, _>")]
    pub max_batches: Option<u64>,
    /// Maximum size of the stored requests and results of all batches.
    #[serde(deserialize_with = "number::<1, 1_048_576, _, _>")]
    pub max_stored_mb: Option<u64>,
    /// Time that results are kept.
    #[serde(deserialize_with = "number::<1, 876_000, _, _>")]
    pub retention_h: Option<u64>,
    /// Longest time that the result files of a batch are kept.
    #[serde(deserialize_with = "number::<1, 876_000, _, _>")]
    pub file_retention_h: Option<u64>,
    /// Number of failed attempts after which a request is abandoned.
    #[serde(deserialize_with = "number::<1, 1000, _, _>")]
    pub max_attempts: Option<u32>,
}

/// `[responses]` in `skep.toml`: limits of stored responses.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ResponseConfig {
    /// Time that responses are kept.
    #[serde(deserialize_with = "number::<1, 36_500, _, _>")]
    pub retention_days: Option<u64>,
    /// Maximum size of all stored responses.
    #[serde(deserialize_with = "number::<1, 1_048_576, _, _>")]
    pub max_stored_mb: Option<u64>,
}

impl ResponseConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut ResponseOptions) {
        let bytes = |mb: u64| mb.saturating_mul(1 << 20);
        let days = |days: u64| Duration::from_secs(days.saturating_mul(24 * 3600));
        options.retention = self.retention_days.map_or(options.retention, days);
        options.max_stored_bytes = self.max_stored_mb.map_or(options.max_stored_bytes, bytes);
    }
}

impl BatchConfig {
    /// Sets the options that the section has.
    pub(super) fn apply(&self, options: &mut BatchOptions) {
        let bytes = |mb: u64| mb.saturating_mul(1 << 20);
        let hours = |hours: u64| Duration::from_secs(hours.saturating_mul(3600));
        options.max_running = self.max_running.unwrap_or(options.max_running);
        options.max_items = self.max_items.unwrap_or(options.max_items);
        options.max_batches = self.max_batches.unwrap_or(options.max_batches);
        options.max_stored_bytes = self.max_stored_mb.map_or(options.max_stored_bytes, bytes);
        options.retention = self.retention_h.map_or(options.retention, hours);
        options.file_retention = self.file_retention_h.map_or(options.file_retention, hours);
        options.max_attempts = self.max_attempts.unwrap_or(options.max_attempts);
    }
}
