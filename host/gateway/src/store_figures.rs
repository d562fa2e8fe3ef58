//! Metrics of the database and of the open work in it, updated when they are requested.

use crate::metrics::{DATABASE_BYTES, DEAD_LETTERS, FREE_BYTES, OPEN_TURNS, WAITING_APPROVALS, WAL_BYTES};
use skep_runtime::{AgentHost, DiskUse, OpenWork};
use std::time::Duration;

/// Timeout of counting the open work. If it expires, these metrics keep their values, so that the others are still
/// reported in time.
const TIMEOUT: Duration = Duration::from_secs(2);

pub(crate) async fn record(host: &AgentHost) {
    if let Some(DiskUse { database, wal, free }) = host.disk_use() {
        metrics::gauge!(DATABASE_BYTES).set(database as f64);
        metrics::gauge!(WAL_BYTES).set(wal as f64);
        if let Some(free) = free {
            metrics::gauge!(FREE_BYTES).set(free as f64);
        }
    }
    match tokio::time::timeout(TIMEOUT, host.open_work()).await {
        Ok(Ok(OpenWork { turns, approvals, dead_letters })) => {
            metrics::gauge!(OPEN_TURNS).set(turns as f64);
            metrics::gauge!(WAITING_APPROVALS).set(approvals as f64);
            metrics::gauge!(DEAD_LETTERS).set(dead_letters as f64);
        }
        Ok(Err(error)) => tracing::warn!(%error, "open work cannot be counted"),
        Err(_elapsed) => tracing::warn!("open work cannot be counted: the database does not respond"),
    }
}
