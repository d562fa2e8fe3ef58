//! Following what agents log: from a line on, without an end, and nothing twice.
//!
//! Lines are told when they are durable, with the turn that logged them. Whoever follows reads them from the store and is
//! only woken from here, so that a slow reader costs nothing and misses nothing but what the store has dropped.

use crate::{
    LogLine, RuntimeError,
    agent_host::{Services, log_line},
};
use skep_store::LogFilter;
use std::sync::Arc;
use tokio::sync::watch;

/// Of one answer.
const PAGE: u32 = 200;

/// Wakes those who follow.
pub(crate) struct LogGrowth(watch::Sender<()>);

/// A place in the log.
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

    /// Lines were stored.
    pub(crate) fn grew(&self) {
        self.0.send_replace(());
    }
}

impl LogFollower {
    pub(crate) fn new(services: Arc<Services>, filter: LogFilter, after_id: i64) -> Self {
        let grown = services.log_growth.0.subscribe();
        LogFollower { services, filter, after_id, grown }
    }

    /// The next lines, once there are any.
    pub async fn next(&mut self) -> Result<Vec<LogLine>, RuntimeError> {
        loop {
            // What is stored from here on wakes again.
            self.grown.borrow_and_update();
            let newest = self.services.store.newest_log_id().await?;
            let rows = self.services.store.logs(&self.filter, Some(self.after_id), PAGE).await?;
            // Lines that are not wanted are not looked at again.
            self.after_id = match rows.last() {
                Some(last) if rows.len() == PAGE as usize => last.id,
                last => last.map_or(newest, |last| last.id.max(newest)),
            };
            if !rows.is_empty() {
                return Ok(rows.into_iter().map(log_line).collect());
            }
            self.grown.changed().await.expect("its sender is in the services, which this holds");
            self.services.admit()?;
        }
    }
}
