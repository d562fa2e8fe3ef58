//! The end of a turn that failed, on its way into the store. Its caller was told, so it must not run again: while the store
//! fails, the end is written again and again, and the turn is held meanwhile.

use super::Live;
use crate::{agent_host::Services, token_budget::Spend};
use skep_store::{StoreError, TurnFailure};
use std::{sync::Arc, time::Duration};

/// Between two tries. It doubles, up to the longest one.
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(5);

pub(crate) struct Settlement {
    pub(crate) failure: TurnFailure,
    /// What it generated all the same.
    pub(crate) spend: Option<Spend>,
    /// Held until the end is written, so that nobody takes the turn up again.
    pub(crate) live: Arc<Live>,
}

impl Settlement {
    /// Returns after the first try. If that fails, a task goes on until the store takes it or the host ends.
    pub(crate) async fn write(self, services: &Arc<Services>) {
        if let Err(error) = self.try_to_write(services).await {
            tracing::error!("the failure of a turn cannot be stored yet: {error}");
            tokio::spawn(self.write_later(services.clone()));
        }
    }

    async fn write_later(self, services: Arc<Services>) {
        let mut wait = FIRST_WAIT;
        loop {
            tokio::select! {
                () = tokio::time::sleep(wait) => {}
                () = services.closing() => return,
            }
            match self.try_to_write(&services).await {
                Ok(()) => return drop(self.live),
                Err(error) => tracing::debug!("the failure of a turn cannot be stored yet: {error}"),
            }
            wait = (wait * 2).min(LONGEST_WAIT);
        }
    }

    async fn try_to_write(&self, services: &Services) -> Result<(), StoreError> {
        match services.store.fail_turn(self.failure.clone()).await {
            Ok(()) => {}
            // It was ended before, perhaps by a write that was made and could not be told, or went with its agent.
            Err(StoreError::TurnNotOpen { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        if let Some(spend) = &self.spend {
            spend.counted();
        }
        if !self.failure.events.is_empty() {
            services.courier_bell.notify_one();
        }
        if !self.failure.logs.is_empty() {
            services.log_growth.grew();
        }
        Ok(())
    }
}
