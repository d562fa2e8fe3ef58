//! The end of a turn in the store: either everything it changed in one commit, or the reason why it
//! failed.

use super::{accepted::Live, actor::Actor, settlement::Settlement};
use crate::{
    Outcome, RuntimeError,
    capability::{TurnContext, check_size, schedule::ScheduleView, state::apply},
    clock::now_ms,
    event::turn_events::TurnEnding,
    metric,
    name::{SessionKey, tenant_of},
    token_budget::Spend,
};
use serde::{Deserialize, Serialize};
use skep_store::{LogEntry, NewEvent, TurnCommit, TurnFailure, TurnKey, TurnState};
use std::sync::Arc;

/// A turn that succeeded, before its commit.
pub(super) struct Answer {
    pub(super) outcome: Outcome,
    pub(super) context: TurnContext,
    pub(super) key: TurnKey,
    /// Limit on the stored size of the session.
    pub(super) session_kb: u32,
    pub(super) spend: Spend,
}

/// The stored reason why a turn failed.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoredFailure {
    pub(crate) code: String,
    pub(crate) message: String,
}

impl StoredFailure {
    pub(crate) fn encode(error: &RuntimeError) -> Vec<u8> {
        let stored = StoredFailure { code: error.code().to_owned(), message: error.to_string() };
        serde_json::to_vec(&stored).expect("strings are always JSON")
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, RuntimeError> {
        serde_json::from_slice(body).map_err(|error| RuntimeError::Internal {
            message: format!("the stored failure of a turn is unreadable: {error}"),
        })
    }
}

pub(crate) fn decode_outcome(body: &[u8]) -> Result<Outcome, RuntimeError> {
    serde_json::from_slice(body).map_err(|error| RuntimeError::Internal {
        message: format!("the stored outcome of a turn is unreadable: {error}"),
    })
}

/// A failed turn, with what is stored about it.
pub(super) struct Failure {
    pub(super) key: TurnKey,
    /// The turn's number in its session, 0 if the turn never started.
    pub(super) number: u64,
    pub(super) logs: Vec<LogEntry>,
    /// `None` if the turn was never opened.
    pub(super) spend: Option<Spend>,
}

impl Actor {
    /// Ends the turn in the store as failed, immediately or as soon as the store accepts the write.
    pub(super) async fn fail(
        &self,
        failure: Failure,
        ending: Option<&TurnEnding>,
        error: &RuntimeError,
        live: &Arc<Live>,
    ) {
        let Failure { key, number, logs, spend } = failure;
        let SessionKey { agent, session } = self.key.clone();
        let at_ms = now_ms();
        let event = ending.and_then(|ending| ending.failed(&self.services.outbox, error, at_ms));
        let events: Vec<NewEvent> = self.services.outbox.with_room(event).await.into_iter().collect();
        let error = StoredFailure::encode(error);
        let token_use = spend.as_ref().and_then(Spend::row);
        // If the calling turn is rerun, it must not repeat the call: part of it may already have
        // happened.
        let keeps_key = number > 0 && ending.is_some_and(TurnEnding::is_of_another_agents_call);
        let failure =
            TurnFailure { key, agent, session, number, at_ms, error, keeps_key, logs, events, token_use };
        Settlement { failure, spend, _live: live.clone() }.write(&self.services).await;
    }

    /// Commits what the turn changed and updates the session in memory.
    pub(super) async fn commit(
        &mut self,
        answer: Answer,
        idempotency_key: Option<String>,
        ending: &TurnEnding,
    ) -> Result<Outcome, RuntimeError> {
        let Answer { outcome, mut context, key, session_kb, spend } = answer;
        let conversations = context.conversations.take();
        let rows = conversations.rows(&self.services.compute, tenant_of(&self.key.session)).await?;
        if let Some(memory) = &self.memory {
            let state = (memory.state_bytes(), context.state.bytes());
            let (before, after) = (memory.conversations.bytes(), memory.conversations.bytes_with(&rows));
            check_size(state.0 + before, state.1 + after, session_kb)?;
        }
        let body = serde_json::to_vec(&outcome).expect("strings, numbers and JSON are always JSON");
        let at_ms = now_ms();
        let outbox = &self.services.outbox;
        let mut events =
            context.events.take().map(|events| events.into_rows(outbox, at_ms)).unwrap_or_default();
        let deliveries = events.iter().map(|event| event.deliveries.len()).sum();
        outbox.reserve(tenant_of(&self.key.session), deliveries).await?;
        metrics::counter!(metric::EVENTS, "source" => "agent").increment(events.len() as u64);
        events.extend(outbox.with_room(ending.done(outbox, &outcome, at_ms)).await);
        let schedules = context.schedules.take().map(ScheduleView::into_changes).unwrap_or_default();
        let rings = !(events.is_empty() && schedules.is_empty());
        let occasion = ending.occasion();
        let commit = TurnCommit {
            agent: self.key.agent.clone(),
            session: self.key.session.clone(),
            key: Some(key),
            turn: outcome.turn,
            at_ms,
            state: context.state.changes(),
            conversations: rows,
            logs: context.log.take(),
            // A turn that an alarm or event started is settled in this commit, and nobody looks it
            // up by its key.
            outcome: Some(skep_store::Outcome {
                idempotency_key: idempotency_key.filter(|_| occasion.is_none()),
                body,
            }),
            occasion,
            schedules,
            events,
            token_use: spend.row(),
        };
        drop(context);
        let commit = Arc::new(commit);
        if let Err(error) = self.services.store.commit_turn(commit.clone()).await {
            self.memory = None;
            // The commit may have succeeded without being confirmed.
            let row = self.services.store.turn_by_key(key).await;
            if !matches!(row, Ok(Some(row)) if matches!(row.state, TurnState::Done { .. })) {
                return Err(error.into());
            }
        }
        spend.counted();
        if rings {
            self.services.courier_bell.notify_one();
        }
        if !commit.logs.is_empty() {
            self.services.log_growth.grew();
        }
        // If the session is no longer in memory, it is read again when needed.
        let Some(memory) = &mut self.memory else { return Ok(outcome) };
        memory.turns = outcome.turn;
        apply(Arc::make_mut(&mut memory.state), &commit.state);
        Arc::make_mut(&mut memory.conversations).remember(conversations, &commit.conversations);
        Ok(outcome)
    }
}
