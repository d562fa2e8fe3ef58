//! Writes the end of a failed turn to the store. The caller has been informed of the failure, so
//! the turn must not run again: while the store fails, the write is retried and the turn stays
//! held.

use super::{Accepted, StoredFailure};
use crate::{
    RuntimeError, capability,
    event::turn_events::TurnEnding,
    feed::Live,
    name::{SessionKey, tenant_of},
    session::TurnHost,
    token_budget::TokenSpend,
    usage::Source,
};
use skep_store::{StoreError, TurnFailure, TurnKey};
use std::sync::Arc;

pub(crate) struct Settlement {
    pub(crate) failure: TurnFailure,
    /// Tokens that the turn generated before it failed. `None` if it did not run in this process.
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
            timeline: Vec::new(),
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
        let spend = match &self.spend {
            Some(spend) => Some(spend.clone()),
            None => self.left_use(host).await?,
        };
        let mut failure = self.failure.clone();
        if let Some(spend) = &spend {
            (failure.token_use, failure.usage) = (spend.row(), spend.usage());
        }
        match host.store.fail_turn(failure).await {
            Ok(()) => {}
            // The turn was ended before, perhaps by a write that succeeded but could not be
            // confirmed, or it was deleted with its agent.
            Err(StoreError::TurnNotOpen { .. } | StoreError::TurnEndedMeanwhile { .. }) => return Ok(()),
            Err(error) => return Err(error),
        }
        if let Some(spend) = &spend {
            spend.add_to_day();
        }
        if !self.failure.events.is_empty() {
            host.outbox.ring();
        }
        if !self.failure.logs.is_empty() {
            host.log.grew();
        }
        Ok(())
    }

    /// Returns what the turn used in processes that died, if it ran in any.
    async fn left_use(&self, host: &TurnHost) -> Result<Option<TokenSpend>, StoreError> {
        let TurnFailure { key, agent, session, .. } = &self.failure;
        let records = host.store.records(*key).await?;
        if records.is_empty() {
            return Ok(None);
        }
        let (models, produced) = match capability::left_use(records) {
            Ok(used) => used,
            Err(error) => {
                tracing::error!(agent, session, "cannot count the model usage of a failed turn: {error}");
                return Ok(None);
            }
        };
        let row = match host.store.turn_by_key(*key).await {
            Err(StoreError::Unreadable { .. }) => None,
            row => row?,
        };
        let (tenant, sent_with) = match row.map(Accepted::read) {
            Some(Ok(Accepted { invocation, .. })) => (invocation.principal, invocation.key),
            Some(Err(_)) | None => (tenant_of(session).to_owned(), None),
        };
        let per_day =
            host.deployments.agent(agent).map_or(u32::MAX, |deployed| deployed.limits.tokens_per_day);
        let share = Arc::new(host.reach.tokens.share(&tenant, Some((agent, per_day))));
        let source =
            Source { tenant, key: sent_with, agent: Some(agent.clone()), session: Some(session.clone()) };
        Ok(Some(TokenSpend::new(&share, produced, &source, &models)))
    }
}
