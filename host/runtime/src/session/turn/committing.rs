//! Committing: everything that the turn changed is written in one transaction.

use super::{
    Run, State, assignment::Assignment, closing::Replied, ended::Ended, failing::Failing, opened::Opened,
};
use crate::{
    Origin, Outcome, RuntimeError, SessionChange,
    capability::{TurnContext, check_size, schedule::ScheduleView, state::apply},
    event::turn_events::TurnEnding,
    metric,
    name::tenant_of,
    session::{Input, actor::Actor},
    token_budget::TokenSpend,
};
use skep_store::{ConversationRow, NewEvent, TurnCommit, TurnKey, TurnState};
use std::{sync::Arc, time::Instant};

/// A turn with a valid reply.
///
/// Durable before: the running row and the complete journal. Durable afterwards, at once: the
/// session's state and conversations, the outcome, log lines, events, schedules and what the
/// turn used of models.
pub(super) struct Committing {
    pub(super) opened: Opened,
    pub(super) replied: Replied,
    /// Number of the last event that the followers were shown.
    pub(super) last_id: u64,
}

/// A turn that succeeded, before its commit.
struct UncommittedTurn {
    outcome: Outcome,
    context: Box<TurnContext>,
    key: TurnKey,
    /// Limit on the stored size of the session.
    session_kb: u32,
    idempotency_key: Option<String>,
    /// The digest of the message, if a client has chosen the idempotency key.
    message_digest: Option<Vec<u8>>,
    spend: TokenSpend,
    /// The stored form of the turn's timeline.
    timeline: Vec<u8>,
}

impl Committing {
    /// Goes to `Ended`. If nothing was committed, the turn is `Failing`.
    pub(super) async fn commit(self, run: &mut Run<'_>) -> State {
        let Committing { opened, replied, last_id } = self;
        let Opened { agent, number, key, turn, assignment, .. } = opened;
        let Assignment { invocation, ending, time, .. } = assignment;
        let Replied { text, data, context } = replied;
        let read_only = match &invocation.origin {
            Origin::Tool(origin) => {
                agent.tools.get(&origin.name).is_some_and(|tool| tool.definition.hints.read_only)
            }
            _ => false,
        };
        let is_keyed = invocation.idempotency_key.is_some() && !invocation.has_key_of_host();
        let message_digest = is_keyed.then(|| Input::digest(&invocation));
        let spend = turn.spend();
        let (usage, elapsed_us) = (turn.usage(), time.elapsed_us());
        drop(turn);
        let uncommitted = UncommittedTurn {
            outcome: Outcome { text, data, turn: number, usage, elapsed_us },
            context,
            key,
            session_kb: agent.limits.session_kb,
            idempotency_key: invocation.idempotency_key,
            message_digest,
            spend: spend.clone(),
            timeline: run.close_timeline(),
        };
        let began = Instant::now();
        match run.actor.commit(uncommitted, &ending).await {
            Ok(outcome) => {
                run.actor.host.live.committed(run.end.feed().turn_id(), began.elapsed());
                run.actor.host.changes.announce(|| SessionChange {
                    agent: run.actor.key.agent.clone(),
                    session: run.actor.key.session.clone(),
                    read_only,
                });
                Ended::Done { last_id, outcome }.into()
            }
            Err(error) => {
                let (spend, ending) = (Some(spend), Some(ending));
                State::Failing(Failing { key, number, logs: Vec::new(), spend, ending, error })
            }
        }
    }
}

impl Actor {
    /// Commits what the turn changed and updates the session in memory.
    async fn commit(
        &mut self,
        uncommitted: UncommittedTurn,
        ending: &TurnEnding,
    ) -> Result<Outcome, RuntimeError> {
        let UncommittedTurn {
            outcome,
            mut context,
            key,
            session_kb,
            idempotency_key,
            message_digest,
            spend,
            timeline,
        } = uncommitted;
        let conversations = context.conversations.take();
        let rows = conversations.rows(&self.host.reach.compute, tenant_of(&self.key.session)).await?;
        self.check_stored_size(&context, &rows, session_kb)?;
        let body = serde_json::to_vec(&outcome).expect("strings, numbers and JSON are always JSON");
        let at_ms = self.host.clock.now_ms();
        let events = self.events(&mut context, &outcome, ending, at_ms).await?;
        let schedules = context.schedules.take().map(ScheduleView::into_changes).unwrap_or_default();
        let trigger = ending.trigger();
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
                idempotency_key: idempotency_key.filter(|_| trigger.is_none()),
                message_digest,
                body,
            }),
            trigger,
            schedules,
            events,
            token_use: spend.row(),
            usage: spend.usage(),
            timeline,
        };
        drop(context);
        let commit = Arc::new(commit);
        self.store_commit(&commit, key).await?;
        spend.add_to_day();
        if !(commit.events.is_empty() && commit.schedules.is_empty()) {
            self.host.outbox.ring();
        }
        if !commit.logs.is_empty() {
            self.host.log.grew();
        }
        // If the session is no longer in memory, it is read again when needed.
        let Some(memory) = &mut self.memory else { return Ok(outcome) };
        memory.turns = outcome.turn;
        apply(Arc::make_mut(&mut memory.state), &commit.state);
        Arc::make_mut(&mut memory.conversations).remember(conversations, &commit.conversations);
        Ok(outcome)
    }

    fn check_stored_size(
        &self,
        context: &TurnContext,
        rows: &[ConversationRow],
        session_kb: u32,
    ) -> Result<(), RuntimeError> {
        let Some(memory) = &self.memory else { return Ok(()) };
        let before = memory.state_bytes() + memory.conversations.bytes();
        let after = context.state.bytes() + memory.conversations.bytes_with(rows);
        check_size(before, after, session_kb)
    }

    /// Returns the events that the guest emitted and the announcement of the turn's end, after
    /// reserving room for their deliveries.
    async fn events(
        &self,
        context: &mut TurnContext,
        outcome: &Outcome,
        ending: &TurnEnding,
        at_ms: u64,
    ) -> Result<Vec<NewEvent>, RuntimeError> {
        let outbox = &self.host.outbox;
        let emitted = context.events.take();
        let mut events = emitted.map(|events| events.into_rows(outbox, at_ms)).unwrap_or_default();
        let deliveries = events.iter().map(|event| event.deliveries.len()).sum();
        outbox.reserve(tenant_of(&self.key.session), deliveries).await?;
        metrics::counter!(metric::EVENTS, "source" => "agent").increment(events.len() as u64);
        events.extend(outbox.with_room(ending.done(outbox, outcome, at_ms)).await);
        Ok(events)
    }

    /// Writes the commit. A write that fails may have succeeded without being confirmed, which the
    /// turn's row then says.
    async fn store_commit(&mut self, commit: &Arc<TurnCommit>, key: TurnKey) -> Result<(), RuntimeError> {
        let Err(error) = self.host.store.commit_turn(commit.clone()).await else { return Ok(()) };
        self.memory = None;
        match self.host.store.turn_by_key(key).await {
            Ok(Some(row)) if matches!(row.state, TurnState::Done { .. }) => Ok(()),
            _ => Err(error.into()),
        }
    }
}
