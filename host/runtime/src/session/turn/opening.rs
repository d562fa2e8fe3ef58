//! Opening: the turn's row says that it runs, and everything that the guest runs with is gathered.

use super::{
    Run, State,
    assignment::{Assignment, TurnTime},
    ended::Ended,
    failing::Failing,
    opened::Opened,
    running::Running,
    span,
};
use crate::{
    Invocation, RunEvent, RuntimeError, Surface,
    capability::tools::TurnTools,
    capability::{
        ConversationSet, SessionQuota, Turn, TurnContext,
        events::TurnEvents,
        log::TurnLog,
        schedule::{Owner, ScheduleView},
        state::StateView,
    },
    component::Deployed,
    event::turn_events::{self, TurnEnding},
    feed::Hold,
    guest::Entry,
    journal::{self, Journal},
    name::SessionKey,
    session::{
        Settlement,
        actor::Actor,
        message::{Accepted, Input, StoredState},
    },
};
use skep_engine::Affinity;
use skep_store::{Acceptance, NewTurn, Record, StoreError, TurnKey, TurnRow};
use std::{sync::Arc, time::Instant};

/// A turn whose message is in memory.
///
/// Durable: what `state` says, which is nothing, a waiting row, or a running row with the journal
/// of an earlier run. A turn that leaves this state for `Running` has a running row with its
/// number, its seed and the digest of its component.
pub(super) struct Opening {
    pub(super) assignment: Assignment,
    pub(super) state: StoredState,
}

/// A turn whose running row is stored, with the session that it starts from.
struct Durable {
    agent: Arc<Deployed>,
    number: u64,
    key: TurnKey,
    journal: Arc<Journal>,
    state: StateView,
    conversations: ConversationSet,
}

impl Opening {
    pub(super) fn new(accepted: Accepted, turn_id: &str, started: Instant) -> Self {
        let Accepted { invocation, received_at_ms, state } = accepted;
        let hold = match state {
            StoredState::Attached => Hold::Cancels,
            StoredState::Waiting { .. } | StoredState::Interrupted { .. } => Hold::Watches,
        };
        let ending = TurnEnding::of(&invocation, turn_id);
        let time = TurnTime::new(started, invocation.deadline);
        Opening { assignment: Assignment { invocation, received_at_ms, hold, ending, time }, state }
    }

    /// Goes to `Running`. A turn that cannot start is `Failing`, left open for a later attempt, or
    /// ended at once if it was never stored.
    pub(super) async fn open(self, run: &mut Run<'_>) -> State {
        match (self.make_durable(run).await, self.state.key()) {
            (Ok(durable), _) => State::Running(self.equip(run, durable)),
            (Err(error), None) => {
                if let RuntimeError::Store(error @ StoreError::Unconfirmed { .. }) = &error {
                    end_unconfirmed(run, error.clone().into()).await;
                }
                Ended::Failed(error).into()
            }
            (Err(error), Some(_)) if stays_open(run.actor, &error) => Ended::LeftOpen(error).into(),
            (Err(error), Some(key)) => {
                State::Failing(Failing::unopened(key, Some(self.assignment.ending), error))
            }
        }
    }

    /// Stores that the turn runs, and publishes to its followers that it has started.
    async fn make_durable(&self, run: &mut Run<'_>) -> Result<Durable, RuntimeError> {
        if run.end.is_abandoned() {
            return Err(RuntimeError::Cancelled);
        }
        let host = run.actor.host.clone();
        let session = run.actor.key.clone();
        let agent = match &self.state {
            StoredState::Interrupted { digest, .. } => {
                host.deployments.with_digest(&session.agent, digest).await?
            }
            StoredState::Attached | StoredState::Waiting { .. } => {
                host.deployments.deployed(&session.agent)?
            }
        };
        let memory = run.actor.memory().await?;
        let number = memory.turns + 1;
        let state = StateView::new(memory.state.clone(), agent.limits.state_kb);
        let bytes = memory.state_bytes() + memory.conversations.bytes();
        let quota = SessionQuota::new(agent.limits.session_kb, bytes);
        let committed = memory.conversations.clone();
        let conversations = ConversationSet::new(committed, (host.store.clone(), session), quota);
        span::set_number(number);

        let (key, seed, records) = self.write_row(run, &agent, number).await?;
        let feed = run.end.feed().clone();
        feed.publish([(0, RunEvent::Started { turn: number })]);
        let journal = Journal::open(host.store.clone(), host.clock.clone(), key, seed, feed, records)?;
        Ok(Durable { agent, number, key, journal, state, conversations })
    }

    /// Returns the turn's key, its seed, and the records of its earlier run.
    async fn write_row(
        &self,
        run: &Run<'_>,
        agent: &Deployed,
        number: u64,
    ) -> Result<(TurnKey, Vec<u8>, Vec<Record>), RuntimeError> {
        let store = &run.actor.host.store;
        match &self.state {
            StoredState::Attached => {
                let SessionKey { agent: name, session } = run.actor.key.clone();
                let seed = journal::seed();
                let row = NewTurn {
                    id: run.end.feed().turn_id().to_owned(),
                    agent: name,
                    session,
                    idempotency_key: None,
                    digest: agent.digest.clone(),
                    input: Input::encode(&self.assignment.invocation),
                    seed: seed.clone(),
                    accepted_at_ms: self.assignment.received_at_ms,
                    number: Some(number),
                };
                let (Acceptance::New(key) | Acceptance::Known(key)) = store.accept_turn(row).await?;
                Ok((key, seed, Vec::new()))
            }
            StoredState::Waiting { key, seed } => {
                store.start_turn(*key, number, agent.digest.clone()).await?;
                Ok((*key, seed.clone(), Vec::new()))
            }
            StoredState::Interrupted { key, seed, .. } => {
                Ok((*key, seed.clone(), store.records(*key).await?))
            }
        }
    }

    fn equip(self, run: &mut Run<'_>, durable: Durable) -> Running {
        let Opening { assignment, .. } = self;
        let Durable { agent, number, key, journal, state, conversations } = durable;
        let resuming = run.actor.resuming.take();
        let turn = turn_of(run, &assignment, &agent, &journal).resumed_in(resuming);
        let turn = Arc::new(turn);
        let SessionKey { agent: name, session } = &run.actor.key;
        let log = TurnLog::new(&run.actor.host.clock, name, session, number);
        let mut context = TurnContext::new(Some(turn.clone()), state, conversations, log, &agent.limits);
        context.events = Some(events_of(run, &assignment.invocation, &agent));
        context.schedules = Some(schedules_of(run, &assignment.invocation, &agent));
        let entry = Entry::new(Invocation::clone(&assignment.invocation), number, assignment.received_at_ms);
        let opened = Opened { agent, number, key, journal, turn, assignment };
        Running { opened, context: Box::new(context), entry }
    }
}

/// Ends a turn that nobody waits for anymore, because it is not known whether its row was written. If it was, the host
/// would run the turn although its caller got an error.
async fn end_unconfirmed(run: &Run<'_>, error: RuntimeError) {
    let (host, place, live) = (run.actor.host.clone(), run.actor.key.clone(), run.live.clone());
    let id = run.end.feed().turn_id().to_owned();
    let read = {
        let (store, place) = (host.store.clone(), place.clone());
        move || {
            let (store, place, id) = (store.clone(), place.clone(), id.clone());
            async move { store.turn(&place.agent, &place.session, &id).await }
        }
    };
    let settle = async move |row: Option<TurnRow>| {
        let Some(row) = row.filter(TurnRow::is_open) else { return };
        Settlement::for_unstarted_turn(&host, row.key, place, &error, false, live).write(&host).await;
    };
    match read().await {
        Ok(row) => settle(row).await,
        Err(error) => {
            tracing::error!("cannot look for a turn whose row may have been written, will retry: {error}");
            let shutdown = run.actor.host.shutdown.clone();
            tokio::spawn(async move {
                if let Some(row) = shutdown.stored("the end of a turn", read).await {
                    settle(row).await;
                }
            });
        }
    }
}

/// Returns the turn as the host functions see it.
fn turn_of(run: &Run<'_>, assignment: &Assignment, agent: &Arc<Deployed>, journal: &Arc<Journal>) -> Turn {
    let (host, SessionKey { agent: name, session }) = (&run.actor.host, &run.actor.key);
    let Assignment { invocation, time, .. } = assignment;
    let affinity = Affinity {
        tenant: invocation.principal.clone(),
        agent: Some(name.clone()),
        session: Some(session.clone()),
        ..Affinity::default()
    };
    let turn_id = run.end.feed().turn_id().to_owned();
    let tools = TurnTools::new(host.reach.tools.clone(), turn_id, &invocation.origin);
    let deadline = time.deadline(assignment.limit_ms(agent));
    let turn = Turn::new(agent.agent.clone(), affinity, deadline, journal.clone(), tools, &host.reach);
    journal.turn_use().start(agent.limits, time.started(), turn.deadline.clone());
    turn.with_priority(invocation.priority)
        .sent_with(invocation.key.clone())
        .logged_in(&host.reach.requests, Surface::of(&invocation.origin))
}

fn events_of(run: &Run<'_>, invocation: &Invocation, agent: &Deployed) -> TurnEvents {
    TurnEvents {
        agent: run.actor.key.agent.clone(),
        principal: invocation.principal.clone(),
        turn_id: run.end.feed().turn_id().to_owned(),
        hops: turn_events::hops(&invocation.origin),
        grants: agent.manifest.grants.events.clone(),
        limit: agent.limits.events,
        emitted: Vec::new(),
        bytes: 0,
    }
}

fn schedules_of(run: &Run<'_>, invocation: &Invocation, agent: &Deployed) -> ScheduleView {
    let SessionKey { agent: name, session } = run.actor.key.clone();
    ScheduleView {
        store: run.actor.host.store.clone(),
        clock: run.actor.host.clock.clone(),
        owner: Owner {
            agent: name,
            session,
            principal: invocation.principal.clone(),
            turn_id: run.end.feed().turn_id().to_owned(),
            limit: agent.limits.schedules,
            takes_alarms: agent.handlers.alarms,
        },
        seen: None,
    }
}

/// Returns whether a turn that could not start stays open, because the reason lies outside the turn
/// or because the session is going away. It then waits for a later attempt.
fn stays_open(actor: &Actor, error: &RuntimeError) -> bool {
    use RuntimeError::{AgentNotFound, Component, Store};
    let waits = match error {
        Store(error) => !matches!(error, StoreError::Unreadable { .. }),
        error => matches!(error, AgentNotFound { .. } | Component { .. }),
    };
    waits || actor.is_gone()
}
