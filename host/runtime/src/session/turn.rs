//! One turn: make it durable, run the guest, commit, and only then inform the caller.
//!
//! No event is published before it is stored, and `Done` is published after the commit. A turn that
//! fails, or whose commit fails, changes nothing. A turn that a host shutdown or crash interrupts
//! stays open in the store if a client may still ask for it, and is rerun from its journal.

use super::{
    accepted::{Input, Live, Message, Standing},
    actor::Actor,
    ending::{Answer, Failure, StoredFailure, decode_outcome},
    entry::Entry,
    turn_span,
};
use crate::name::SessionKey;
use crate::{
    Invocation, Json, Origin, Outcome, RunEvent, RuntimeError,
    agent_host::{Active, Services},
    capability::{
        ConversationSet, SessionRoom, Turn, TurnContext,
        events::TurnEvents,
        log::TurnLog,
        schedule::{Owner, ScheduleView},
        state::StateView,
    },
    component::Deployed,
    error::known_code,
    event::turn_events::{self, TurnEnding},
    feed::{Feed, TurnEnd},
    guest,
    host_tools::TurnTools,
    intake::Held,
    journal::{self, Journal},
    metric,
};
use skep_engine::Affinity;
use skep_store::{Acceptance, NewTurn, StoreError, TurnKey, TurnState};
use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};
use tracing::{Instrument, Span};

/// A message that is queued for its turn.
pub(crate) struct TurnRequest {
    pub(crate) message: Message,
    pub(crate) end: TurnEnd,
    /// The span of the sender of the message.
    pub(crate) parent: Span,
    /// Held until the turn has ended, also in the store, and all its followers have been informed.
    pub(crate) live: Arc<Live>,
    /// Held until the turn has ended, so that a drain waits for it.
    pub(crate) _active: Active,
    /// The memory reserved for the message, held until the turn has ended.
    pub(crate) held: Held,
}

impl TurnRequest {
    pub(crate) fn new(
        message: Message,
        feed: Arc<Feed>,
        live: Arc<Live>,
        active: Active,
        held: Held,
    ) -> Self {
        let (end, parent) = (TurnEnd::new(feed), Span::current());
        TurnRequest { message, end, parent, live, _active: active, held }
    }
}

/// A turn that is durable and about to run.
struct Opened {
    agent: Arc<Deployed>,
    number: u64,
    key: TurnKey,
    journal: Arc<Journal>,
    /// `None` while the turn is parked.
    context: Option<TurnContext>,
    turn: Arc<Turn>,
}

impl Actor {
    pub(super) async fn turn(&mut self, request: TurnRequest) {
        let TurnRequest { message, end, parent, live, _active, held } = request;
        let span = turn_span::begin(&parent, &self.key, end.feed().turn_id());
        let started = Instant::now();
        let result = self.run_message(message, &end, started, &live).instrument(span.clone()).await;

        let label = result.as_ref().map_or_else(RuntimeError::code, |_| "ok");
        let agent = self.key.agent.clone();
        metrics::counter!(metric::TURNS, "agent" => agent.clone(), "outcome" => label).increment(1);
        metrics::histogram!(metric::TURN_TIME, "agent" => agent).record(started.elapsed());
        turn_span::end(&span, &result);
        // A caller that sees the turn end can rely on the message's memory being released.
        drop(held);
        match result {
            Ok((last_id, outcome)) => end.feed().end(last_id + 1, Ok(outcome)),
            Err(error) => end.feed().end(0, Err(error)),
        }
    }

    /// Returns the outcome, and the number of the last event before it.
    async fn run_message(
        &mut self,
        message: Message,
        end: &TurnEnd,
        started: Instant,
        live: &Arc<Live>,
    ) -> Result<(u64, Outcome), RuntimeError> {
        match message {
            Message::Here { invocation, received_at_ms, standing } => {
                self.run_turn(*invocation, received_at_ms, standing, end, started, live).await
            }
            Message::Stored(key) => {
                let services = self.services.clone();
                // Limits how many turns are resumed at once, so that the turns left by the last
                // process do not fill the memory of this one.
                let mut gone = self.gone.clone();
                self.resuming = tokio::select! {
                    place = services.place_to_resume() => Some(place),
                    () = end.abandoned() => None,
                    _ = gone.changed() => return Err(RuntimeError::Cancelled),
                    () = services.closing() => return Err(RuntimeError::ShuttingDown),
                };
                services.store.take_up_turn(key).await?;
                let read = match services.store.turn_by_key(key).await {
                    Ok(None) => return Err(RuntimeError::Cancelled),
                    // This actor owns the turn now, but the turn may have ended before that.
                    Ok(Some(row)) if !row.is_open() => return ended_before(row.state),
                    Ok(Some(row)) => Message::read(row),
                    Err(error @ StoreError::Unreadable { .. }) => Err(error.into()),
                    Err(error) => return Err(error.into()),
                };
                match read {
                    Ok(read) => {
                        tracing::info!("resuming a turn");
                        Box::pin(self.run_message(read, end, Instant::now(), live)).await
                    }
                    Err(error) => {
                        tracing::error!("the turn cannot be resumed and has failed: {error}");
                        let failure = Failure { key, number: 0, logs: Vec::new(), spend: None };
                        self.fail(failure, None, &error, live).await;
                        Err(error)
                    }
                }
            }
        }
    }

    async fn run_turn(
        &mut self,
        mut invocation: Invocation,
        received_at_ms: u64,
        mut standing: Standing,
        end: &TurnEnd,
        mut started: Instant,
        live: &Arc<Live>,
    ) -> Result<(u64, Outcome), RuntimeError> {
        let is_attached = matches!(standing, Standing::Attached);
        let ending = TurnEnding::of(&invocation, end.feed().turn_id());
        let tool = match &invocation.origin {
            Origin::Tool(tool) => Some(tool.name.clone()),
            _ => None,
        };
        let services = self.services.clone();
        let (opened, result) = loop {
            let key = standing.key();
            let mut opened = match self.open(&invocation, received_at_ms, standing, end, started).await {
                Ok(opened) => opened,
                Err(error) => {
                    if let Some(key) = key.filter(|_| !self.stays_open(&error)) {
                        let failure = Failure { key, number: 0, logs: Vec::new(), spend: None };
                        self.fail(failure, Some(&ending), &error, live).await;
                    }
                    return Err(error);
                }
            };
            let entry = Entry::new(invocation.clone(), opened.number, received_at_ms);
            let Some(result) = self.call_guest(&services, &mut opened, end, entry).await else {
                let parked_at = Instant::now();
                opened.turn.lets_others_resume();
                let pause = opened.turn.approvals.pause();
                end.set_parked(pause.clone());
                self.pauses.send_replace(pause);
                let waited = self.wait_parked(&services, &opened.journal, &opened.turn, end).await;
                end.set_parked(None);
                self.pauses.send_replace(None);
                if let Err(error) = waited {
                    break (opened, Err(error));
                }
                let Opened { key, journal, agent, .. } = opened;
                standing = Standing::CutOff { key, seed: journal.seed(), digest: agent.digest.clone() };
                // Time spent parked does not count.
                started += parked_at.elapsed();
                invocation.deadline = invocation.deadline.map(|deadline| deadline + parked_at.elapsed());
                continue;
            };
            break (opened, result);
        };
        let Opened { agent, number, key, journal, mut context, turn } = opened;
        let idempotency_key = invocation.idempotency_key.take();
        let result = result.and_then(|reply| match &tool {
            Some(tool) => agent.check_result(tool, reply.1.as_ref()).map(|()| reply),
            None => Ok(reply),
        });
        // If the journal stopped, its error is the reason why the guest was stopped.
        let result = match journal.close().await {
            Err(error) => Err(error),
            Ok(last_id) => match result {
                Ok(reply) => journal.check_replayed().map(|()| (last_id, reply)),
                Err(error) => Err(error),
            },
        };
        let goes_on_later = match &result {
            Err(RuntimeError::ShuttingDown) => !is_attached,
            Err(_) => !is_attached && self.is_gone(),
            Ok(_) => false,
        };
        if !goes_on_later {
            turn.tools.called.cancel(&services);
        }
        let spend = turn.spend();
        let ended = match result {
            Ok((last_id, (text, data))) => {
                let outcome = Outcome {
                    text,
                    data,
                    turn: number,
                    usage: turn.usage(),
                    elapsed_us: elapsed_us(started),
                };
                drop(turn);
                let context = context.expect("a guest that replied leaves its context");
                let session_kb = agent.limits.session_kb;
                let answer = Answer { outcome, context, key, session_kb, spend: spend.clone() };
                self.commit(answer, idempotency_key, &ending).await.map(|outcome| (last_id, outcome))
            }
            // The turn is resumed when the host starts again.
            Err(error) if goes_on_later => {
                return Err(services.admit().err().unwrap_or(error));
            }
            Err(error) => {
                let logs = context.as_mut().map(|context| context.log.take()).unwrap_or_default();
                self.fail(Failure { key, number, logs, spend: Some(spend) }, Some(&ending), &error, live)
                    .await;
                return Err(error);
            }
        };
        if let Err(error) = &ended {
            let failure = Failure { key, number, logs: Vec::new(), spend: Some(spend) };
            self.fail(failure, Some(&ending), error, live).await;
        }
        ended
    }

    /// Makes the turn durable and gathers everything that it runs with. Publishes to its followers
    /// that it has started.
    async fn open(
        &mut self,
        invocation: &Invocation,
        received_at_ms: u64,
        standing: Standing,
        end: &TurnEnd,
        started: Instant,
    ) -> Result<Opened, RuntimeError> {
        if end.is_abandoned() {
            return Err(RuntimeError::Cancelled);
        }
        let services = self.services.clone();
        let SessionKey { agent: agent_name, session } = self.key.clone();
        let agent = match &standing {
            Standing::CutOff { digest, .. } => services.agent_with(&agent_name, digest).await?,
            Standing::Attached | Standing::Waiting { .. } => services.deployed(&agent_name)?,
        };
        let memory = self.memory().await?;
        let number = memory.turns + 1;
        let state = StateView::new(memory.state.clone(), agent.limits.state_kb);
        let room =
            SessionRoom::new(agent.limits.session_kb, memory.state_bytes() + memory.conversations.bytes());
        let conversations = ConversationSet::new(
            memory.conversations.clone(),
            (services.store.clone(), self.key.clone()),
            room,
        );
        turn_span::is_turn(number);

        let store = &services.store;
        let (key, seed, records) = match standing {
            Standing::Attached => {
                let seed = journal::seed();
                let row = NewTurn {
                    id: end.feed().turn_id().to_owned(),
                    agent: agent_name.clone(),
                    session: session.clone(),
                    idempotency_key: None,
                    digest: agent.digest.clone(),
                    input: Input::encode(invocation),
                    seed: seed.clone(),
                    accepted_at_ms: received_at_ms,
                    number: Some(number),
                };
                let (Acceptance::New(key) | Acceptance::Known(key)) = store.accept_turn(row).await?;
                (key, seed, Vec::new())
            }
            Standing::Waiting { key, seed } => {
                store.start_turn(key, number, agent.digest.clone()).await?;
                (key, seed, Vec::new())
            }
            Standing::CutOff { key, seed, .. } => (key, seed, store.records(key).await?),
        };
        let feed = end.feed().clone();
        feed.publish([(0, RunEvent::Started { turn: number })]);
        let journal = Journal::open(store.clone(), key, seed, feed, records)?;

        let mut deadline = started + Duration::from_millis(agent.limits.turn_ms.into());
        if let Some(asked) = invocation.deadline {
            deadline = deadline.min(asked);
        }
        let affinity = Affinity {
            tenant: invocation.principal.clone(),
            agent: Some(agent_name.clone()),
            session: Some(session.clone()),
            parent: None,
        };
        let tools = TurnTools::new(services.clone(), end.feed().turn_id().to_owned(), &invocation.origin);
        let (models, egress) = (services.models.clone(), services.egress.clone());
        let turn = Turn::new(agent.agent.clone(), models, affinity, deadline, journal.clone(), tools, egress);
        let turn = turn.with_priority(invocation.priority).resumed_in(self.resuming.take());
        let turn = Arc::new(turn);
        let mut context = TurnContext::new(
            Some(turn.clone()),
            state,
            conversations,
            TurnLog::new(&agent_name, &session, number),
            &agent.limits,
        );
        let turn_id = end.feed().turn_id().to_owned();
        context.events = Some(TurnEvents {
            agent: agent_name.clone(),
            principal: invocation.principal.clone(),
            turn_id: turn_id.clone(),
            hops: turn_events::hops(&invocation.origin),
            grants: agent.manifest.grants.events.clone(),
            limit: agent.limits.events,
            emitted: Vec::new(),
            bytes: 0,
        });
        context.schedules = Some(ScheduleView {
            store: store.clone(),
            clock: services.clock.clone(),
            owner: Owner {
                agent: agent_name,
                session,
                principal: invocation.principal.clone(),
                turn_id,
                limit: agent.limits.schedules,
                takes_alarms: agent.handlers.alarms,
            },
            seen: None,
        });
        Ok(Opened { agent, number, key, journal, context: Some(context), turn })
    }

    /// Returns whether a turn that could not start stays open, because the reason lies outside the
    /// turn or because the session is going away. It then waits for a later attempt.
    fn stays_open(&self, error: &RuntimeError) -> bool {
        use RuntimeError::{AgentNotFound, Component, Store};
        let waits = match error {
            Store(error) => !matches!(error, StoreError::Unreadable { .. }),
            error => matches!(error, AgentNotFound { .. } | Component { .. }),
        };
        waits || self.is_gone()
    }

    /// Returns whether nobody wants this session anymore, because the host shuts down or the agent
    /// was deleted.
    fn is_gone(&self) -> bool {
        self.gone.has_changed().is_err()
    }

    /// Waits until a parked turn may continue.
    async fn wait_parked(
        &self,
        services: &Services,
        journal: &Journal,
        turn: &Turn,
        end: &TurnEnd,
    ) -> Result<(), RuntimeError> {
        if !journal.is_stored().await {
            return Err(RuntimeError::Cancelled);
        }
        let mut gone = self.gone.clone();
        tokio::select! {
            () = turn.approvals.decided(&services.clock) => Ok(()),
            () = end.abandoned() => Err(RuntimeError::Cancelled),
            _ = gone.changed() => Err(RuntimeError::Cancelled),
            () = services.closing() => Err(RuntimeError::ShuttingDown),
        }
    }

    /// Runs the guest and returns its reply. Returns `None` if the guest was dropped because it is
    /// only waiting for people.
    async fn call_guest(
        &self,
        services: &Services,
        opened: &mut Opened,
        end: &TurnEnd,
        entry: Entry,
    ) -> Option<Result<(String, Option<Json>), RuntimeError>> {
        let Opened { agent, turn, journal, context, .. } = opened;
        let mut gone = self.gone.clone();
        let parked = AtomicBool::new(false);
        let stop = async {
            tokio::select! {
                () = end.abandoned() => {}
                _ = gone.changed() => {}
                () = journal.only_waits() => parked.store(true, Ordering::Relaxed),
            }
        };
        tokio::pin!(stop);
        tokio::select! {
            approved = entry.approved(turn) => match approved {
                Ok(Ok(())) => {}
                Ok(Err(message)) => return Some(Err(RuntimeError::CallRefused { message })),
                // The journal holds the reason.
                Err(journal::Stopped) => return Some(Err(RuntimeError::Cancelled)),
            },
            () = &mut stop => {
                return (!parked.load(Ordering::Relaxed)).then_some(Err(RuntimeError::Cancelled));
            }
        }
        let instance = tokio::select! {
            instance = tokio::time::timeout_at(turn.deadline.into(), services.instance(turn.tools.callers.len(), &turn.affinity.tenant)) => instance,
            () = &mut stop => return Some(Err(RuntimeError::Cancelled)),
        };
        let Ok(_instance) = instance else { return Some(Err(RuntimeError::DeadlineExceeded)) };
        let running = context.take().expect("the context is set until the guest is called");
        let (result, after) =
            guest::take_turn(agent.code(services.wasm()), turn.deadline, stop, running, entry).await;
        if result.is_err() && parked.load(Ordering::Relaxed) {
            return None;
        }
        *context = Some(after);
        let outcome = result.and_then(|reply| reply.into_outcome(turn.deadline));
        Some(outcome.map_err(|error| turn.explain(error)))
    }
}

/// Returns the result of a turn that another owner ran to completion.
fn ended_before(state: TurnState) -> Result<(u64, Outcome), RuntimeError> {
    match state {
        TurnState::Done { outcome, .. } => Ok((0, decode_outcome(&outcome)?)),
        TurnState::Failed { error, .. } => {
            let StoredFailure { code, message } = StoredFailure::decode(&error)?;
            Err(RuntimeError::TurnFailed { code: known_code(&code), message })
        }
        TurnState::Waiting | TurnState::Running { .. } => Err(RuntimeError::Cancelled),
    }
}

fn elapsed_us(started: Instant) -> u64 {
    u64::try_from(started.elapsed().as_micros()).unwrap_or(u64::MAX)
}
