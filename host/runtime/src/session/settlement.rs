//! The end of a turn that failed, on its way into the store. Its caller was told, so it must not run again: while the store
//! fails, the end is written again and again, and the turn is held meanwhile.

use super::{Live, Message, SessionKey, StoredFailure};
use crate::{
    RuntimeError, agent_host::Services, capability::log::now_ms, event::turn_events::TurnEnding,
    store_retry::stored, token_budget::Spend,
};
use skep_store::{StoreError, TurnFailure, TurnKey};
use std::sync::Arc;

pub(crate) struct Settlement {
    pub(crate) failure: TurnFailure,
    /// What it generated all the same.
    pub(crate) spend: Option<Spend>,
    /// Held until the end is written, so that nobody takes the turn up again.
    pub(crate) _live: Arc<Live>,
}

impl Settlement {
    /// A turn that ran in processes that died, and does not run in this one. Its end is told as that of any turn that failed.
    pub(crate) async fn of_lost(
        services: &Services,
        key: TurnKey,
        place: SessionKey,
        error: &RuntimeError,
        live: Arc<Live>,
    ) -> Self {
        let mut settlement = Settlement::of_unbegun(key, place, error, true, live);
        // One that cannot be read has nobody to be told about.
        if let Ok(Some(row)) = services.store.turn_by_key(key).await
            && let id = row.id.clone()
            && let Ok(Message::Here { invocation, .. }) = Message::read(row)
        {
            let event =
                TurnEnding::of(&invocation, &id).failed(&services.outbox, error, settlement.failure.at_ms);
            settlement.failure.events.extend(services.outbox.with_room(event).await);
        }
        settlement
    }

    /// Of a turn that never began.
    pub(crate) fn of_unbegun(
        key: TurnKey,
        SessionKey { agent, session }: SessionKey,
        error: &RuntimeError,
        keeps_key: bool,
        live: Arc<Live>,
    ) -> Self {
        let failure = TurnFailure {
            key,
            agent,
            session,
            number: 0,
            at_ms: now_ms(),
            error: StoredFailure::encode(error),
            keeps_key,
            logs: Vec::new(),
            events: Vec::new(),
            token_use: None,
        };
        Settlement { failure, spend: None, _live: live }
    }

    /// Returns after the first try. If that fails, a task goes on until the store takes it or the host ends.
    pub(crate) async fn write(self, services: &Arc<Services>) {
        if let Err(error) = self.try_to_write(services).await {
            tracing::error!("the failure of a turn cannot be stored yet: {error}");
            let services = services.clone();
            tokio::spawn(async move {
                let (settlement, services) = (&self, &*services);
                stored(services, "the failure of a turn", || settlement.try_to_write(services)).await;
            });
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
