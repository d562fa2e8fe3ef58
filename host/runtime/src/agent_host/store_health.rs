//! Checks whether the database accepts writes, and warns before its disk is full.

use super::AgentHost;
use crate::RuntimeError;
use skep_store::{Store, StoreError};
use std::time::{Duration, Instant};
use tokio::{
    sync::Mutex,
    time::{MissedTickBehavior, interval, timeout},
};

/// Time for which a result is reused, so that frequent checks cost nothing.
const BELIEVED: Duration = Duration::from_secs(1);
/// A database that takes longer for one small write is not ready.
const DEADLINE: Duration = Duration::from_secs(2);
/// Interval at which the free disk space is checked.
const INTERVAL: Duration = Duration::from_secs(30);

pub(super) struct StoreHealth {
    store: Store,
    last: Mutex<Option<(Instant, Result<(), StoreError>)>>,
}

impl AgentHost {
    /// Checks whether the database accepts writes, by committing a small write at most once a
    /// second.
    pub async fn store_ready(&self) -> Result<(), RuntimeError> {
        let slow = |_elapsed| RuntimeError::StoreStalled { waited_s: DEADLINE.as_secs() };
        Ok(timeout(DEADLINE, self.inner.store_health.check()).await.map_err(slow)??)
    }
}

impl StoreHealth {
    pub(super) fn new(store: Store) -> Self {
        StoreHealth { store, last: Mutex::default() }
    }

    async fn check(&self) -> Result<(), StoreError> {
        let mut last = self.last.lock().await;
        if let Some((at, result)) = &*last
            && at.elapsed() < BELIEVED
        {
            return result.clone();
        }
        let result = self.store.check().await;
        *last = Some((Instant::now(), result.clone()));
        result
    }
}

/// Warns when the disk of the database has less than `warn_below_bytes` free. Runs until the host
/// stops.
pub(super) async fn watch(store: Store, warn_below_bytes: u64) {
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_low = false;
    loop {
        ticks.tick().await;
        let Some(free_bytes) = store.free_bytes() else { return };
        let was_low = std::mem::replace(&mut is_low, free_bytes < warn_below_bytes);
        match (was_low, is_low) {
            (false, true) => tracing::warn!(
                free_bytes,
                warn_below_bytes,
                "the disk of the data folder is nearly full; when it is full, no turn can be stored"
            ),
            (true, false) => tracing::info!(free_bytes, "the disk of the data folder has enough space again"),
            _ => {}
        }
    }
}
