//! Follows the log lines of agents from a given line on, without end and without duplicates.
//!
//! Lines become visible when they are durable, together with the turn that logged them. A follower
//! reads them from the store and is only woken from here, so a slow reader costs nothing and misses
//! only what the store has dropped.

use crate::{
    LogLine, RuntimeError,
    agent_host::{Services, log_line},
};
use skep_store::LogFilter;
use std::sync::Arc;
use tokio::sync::watch;

/// Maximum number of lines returned at once.
const PAGE: u32 = 200;

/// Wakes the log followers.
pub(crate) struct LogGrowth(watch::Sender<()>);

/// A position in the log.
pub struct LogFollower {
    services: Arc<Services>,
    filter: LogFilter,
    after_id: i64,
    grown: watch::Receiver<()>,
}

impl LogGrowth {
    pub(crate) fn new() -> Self {
        LogGrowth(watch::Sender::new(()))
    }

    /// Wakes the followers after lines were stored.
    pub(crate) fn grew(&self) {
        self.0.send_replace(());
    }
}

impl LogFollower {
    pub(crate) fn new(services: Arc<Services>, filter: LogFilter, after_id: i64) -> Self {
        let grown = services.log_growth.0.subscribe();
        LogFollower { services, filter, after_id, grown }
    }

    /// Returns the next lines, once there are any.
    pub async fn next(&mut self) -> Result<Vec<LogLine>, RuntimeError> {
        loop {
            // Lines that are stored from here on wake the follower again.
            self.grown.borrow_and_update();
            let newest = self.services.store.newest_log_id().await?;
            let rows = self.services.store.logs(&self.filter, Some(self.after_id), PAGE).await?;
            // Lines that the filter excludes are skipped for good.
            self.after_id = match rows.last() {
                Some(last) if rows.len() == PAGE as usize => last.id,
                last => last.map_or(newest, |last| last.id.max(newest)),
            };
            if !rows.is_empty() {
                return Ok(rows.into_iter().map(log_line).collect());
            }
            self.grown.changed().await.expect("the follower holds the services, which own the sender");
            self.services.admit()?;
        }
    }
}
