//! Writes the end of a failed turn to the store. The caller has been informed of the failure, so
//! the turn must not run again: while the store fails, the write is retried and the turn stays
//! held.

use super::{Accepted, StoredFailure};
use crate::{
    RuntimeError, event::turn_events::TurnEnding, feed::Live, name::SessionKey, session::TurnHost,
    token_budget::TokenSpend,
};
use skep_store::{StoreError, TurnFailure, TurnKey};
use std::sync::Arc;

pub(crate) struct Settlement {
    pub(crate) failure: TurnFailure,
    /// Tokens that the turn generated before it failed.
    pub(crate) spend: Option<TokenSpend>,
    /// Held until the end is written, so that nobody resumes the turn.
    pub(crate) _live: Arc<Live>,
}

impl Settlement {
    /// Creates the settlement of a turn that ran in processes that died and does not run in this
    /// one. Its end is published like that of any failed turn.
    pub(crate) async fn for_lost_turn(
        host: &TurnHost,
        key: TurnKey,
        session: SessionKey,
        error: &RuntimeError,
        live: Arc<Live>,
    ) -> Self {
        let mut settlement = Settlement::for_unstarted_turn(host, key, session, error, true, live);
        // A turn that cannot be read has no recipient to publish to.
        if let Ok(Some(row)) = host.store.turn_by_key(key).await
            && let id = row.id.clone()
            && let Ok(Accepted { invocation, .. }) = Accepted::read(row)
        {
            let event =
                TurnEnding::of(&invocation, &id).failed(&host.outbox, error, settlement.failure.at_ms);
            settlement.failure.events.extend(host.outbox.with_room(event).await);
        }
        settlement
    }

    /// Creates the settlement of a turn that never started.
    pub(crate) fn for_unstarted_turn(
        host: &TurnHost,
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
            at_ms: host.clock.now_ms(),
            error: StoredFailure::encode(error),
            keeps_key,
            logs: Vec::new(),
            events: Vec::new(),
            token_use: None,
            usage: Vec::new(),
        };
        Settlement { failure, spend: None, _live: live }
    }

    /// Returns after the first attempt. If it fails, a task retries until the store accepts the
    /// write or the host stops.
    pub(crate) async fn write(self, host: &Arc<TurnHost>) {
        if let Err(error) = self.try_to_write(host).await {
            tracing::error!("cannot store the failure of a turn yet, will retry: {error}");
            let host = host.clone();
            tokio::spawn(async move {
                let (settlement, host) = (&self, &*host);
                host.shutdown.stored("the failure of a turn", || settlement.try_to_write(host)).await;
            });
        }
    }

    async fn try_to_write(&self, host: &TurnHost) -> Result<(), StoreError> {
        match host.store.fail_turn(self.failure.clone()).await {
            Ok(()) => {}
            // The turn was ended before, perhaps by a write that succeeded but could not be
            // confirmed, or it was deleted with its agent.
            Err(StoreError::TurnNotOpen { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        if let Some(spend) = &self.spend {
            spend.counted();
        }
        if !self.failure.events.is_empty() {
            host.outbox.ring();
        }
        if !self.failure.logs.is_empty() {
            host.log.grew();
        }
        Ok(())
    }
}
