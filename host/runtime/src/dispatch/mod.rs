//! Accepts turns, finds them again, and lets callers follow or cancel them, also after a restart and on whichever host of the
//! cluster they run.

pub(crate) mod adoption;
mod forwarding;
mod held;
mod keyed;
mod place;
mod pump;
mod release;

pub(crate) use place::{Asks, Place, Purpose};

use crate::{
    AgentName, Invocation, Origin, RunHandle, RuntimeError, SessionId, TurnClient, TurnDetail, TurnPhase,
    TurnTimeline,
    admission::Admission,
    agent::Agent,
    capability::tools::{Accepting, Invoke},
    cluster::Owned,
    error::known_code,
    feed::{Feed, Hold, Live, SuspensionWatch},
    journal,
    name::{SessionKey, plain_session, tenant_of},
    placement::AgentDigest,
    session::{
        Accepted, Command, Input, Message, Sessions, Settlement, StoredFailure, StoredState, TurnHost,
        TurnRequest, decode_outcome,
    },
    text::excerpt,
};
use forwarding::{Located, Target, outlives_caller};
use skep_store::{Acceptance, ListedTurn, NewTurn, TurnRow, TurnState};
use std::sync::{Arc, Weak};
use tracing::Instrument as _;

const MAX_MESSAGE_BYTES: usize = 16 << 20;
const MAX_IDEMPOTENCY_KEY_BYTES: usize = 128;
/// Number of digits in the id of a turn. A shorter one of decimal digits is the turn's number.
const TURN_ID_LENGTH: usize = 32;
/// Retry delay reported to a caller whose turn is waiting for its agent.
const RETRY_AFTER_MS: u32 = 1_000;

/// Accepts turns and hands them to their sessions. Everything that starts a turn uses it: callers, the courier, batches, and
/// turns that call other agents.
pub(crate) struct Dispatch {
    pub(crate) host: Arc<TurnHost>,
    pub(crate) admission: Admission,
    pub(crate) sessions: Arc<Sessions>,
}

impl Invoke for Dispatch {
    fn invoke(self: Arc<Self>, invocation: Invocation) -> Accepting {
        Box::pin(async move { self.invoke_as_host(invocation).await })
    }
}

impl Dispatch {
    /// Accepts a message of a client, as [`crate::AgentHost::invoke`] describes.
    ///
    /// Idempotency keys that start with [`crate::invocation::OWN_KEY`] are reserved for the host; no client can create one.
    pub(crate) async fn invoke(self: &Arc<Self>, invocation: Invocation) -> Result<RunHandle, RuntimeError> {
        check_key(&invocation)?;
        self.invoke_as_host(invocation).await
    }

    /// Does the same as [`Dispatch::invoke`], for a client that can receive notifications and questions until it is dropped.
    /// It receives none from a turn that runs on another host.
    pub(crate) async fn invoke_for(
        self: &Arc<Self>,
        invocation: Invocation,
        client: Weak<dyn TurnClient>,
    ) -> Result<RunHandle, RuntimeError> {
        check_key(&invocation)?;
        // A turn on another host sends its client nothing but events.
        self.accept(invocation, Some(client), Purpose::Change, Asks::Others).await
    }

    /// Does the same as [`Dispatch::invoke`], but for work that the host starts itself with internal keys.
    pub(crate) async fn invoke_as_host(
        self: &Arc<Self>,
        invocation: Invocation,
    ) -> Result<RunHandle, RuntimeError> {
        self.accept(invocation, None, Purpose::Begin, Asks::Others).await
    }

    /// Does the same as [`Dispatch::invoke_as_host`] for work that this host has taken because it has room for it: a session that
    /// nobody owns begins here.
    pub(crate) async fn invoke_taken(
        self: &Arc<Self>,
        invocation: Invocation,
    ) -> Result<RunHandle, RuntimeError> {
        self.accept(invocation, None, Purpose::Change, Asks::Others).await
    }

    /// Does the same as [`Dispatch::invoke_as_host`] for another host, and only if this one owns the session or can claim it.
    pub(crate) async fn invoke_here(
        self: &Arc<Self>,
        invocation: Invocation,
    ) -> Result<RunHandle, RuntimeError> {
        self.accept(invocation, None, Purpose::Change, Asks::Nobody).await
    }

    async fn accept(
        self: &Arc<Self>,
        invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
        purpose: Purpose,
        asks: Asks,
    ) -> Result<RunHandle, RuntimeError> {
        self.host.shutdown.admit()?;
        AgentName::new(&invocation.agent)?;
        SessionId::new(&invocation.session)?;
        if tenant_of(&invocation.session) != invocation.principal {
            return Err(session_not_found(&invocation.agent, &invocation.session));
        }
        check(&invocation)?;
        let agent = self.host.deployments.find(&invocation.agent).await?;
        if let Origin::Tool(tool) = &invocation.origin {
            agent.check_call(&tool.name, invocation.data.as_ref())?;
        }
        if let Some(handle) = self.already_running(&invocation, asks).await? {
            return Ok(handle);
        }
        let key = session_key(&invocation);
        let was_owned = self.host.cluster.ownership.owns(&key);
        match self.place(&key, purpose, asks).await? {
            Place::Here(owned) => {
                let accepted = self.accept_with(agent, invocation, client, owned).await;
                self.unless_refused(accepted, &key, was_owned).await
            }
            Place::There(member) => self.forward(invocation, client, purpose, Target::Owner(member)).await,
            Place::Chosen(member) => self.forward(invocation, client, purpose, Target::Chosen(member)).await,
        }
    }

    /// Accepts a message, whose session this host owns, after its agent was checked elsewhere.
    async fn accept_here(
        self: &Arc<Self>,
        invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
        owned: Owned,
    ) -> Result<RunHandle, RuntimeError> {
        self.host.shutdown.admit()?;
        let agent = self.host.deployments.agent(&invocation.agent)?;
        self.accept_with(agent, invocation, client, owned).await
    }

    async fn accept_with(
        self: &Arc<Self>,
        agent: Arc<Agent>,
        invocation: Invocation,
        client: Option<Weak<dyn TurnClient>>,
        owned: Owned,
    ) -> Result<RunHandle, RuntimeError> {
        self.host.cluster.note_turn(|| digest_of(&agent, &invocation.session));
        let feed = Feed::new(uuid::Uuid::now_v7().simple().to_string());
        if let Some(client) = &client {
            feed.serve(client.clone());
        }
        // Another caller with the same idempotency key can find the turn as soon as its row is
        // stored.
        let live = self.host.live.enter(&feed, owned).expect("the turn's id is new");
        if outlives_caller(&invocation) {
            // Runs in a separate task, because a stored turn must reach its session even if the
            // caller is gone by then.
            let accepting = self.clone().invoke_durably(invocation, feed, live).in_current_span();
            let accepted = tokio::spawn(accepting).await.unwrap_or_else(|error| {
                let message = format!("a message could not be accepted: {error}");
                Err(RuntimeError::Internal { message })
            });
            // The turn may be a known one, which now has another client.
            if let (Ok(handle), Some(client)) = (&accepted, client) {
                handle.serve(client);
            }
            return accepted;
        }
        self.admission.held.check(&invocation.agent, &invocation.session)?;
        let handle = feed.follow(Hold::Cancels);
        let admitted = self.admission.take(&agent, &invocation)?;
        let key = session_key(&invocation);
        let message = in_memory(invocation, self.host.clock.now_ms(), StoredState::Attached);
        let request = TurnRequest::new(message, feed, live, admitted);
        let in_front = self.enqueue(key, request)?;
        Ok(handle.behind(in_front))
    }

    /// Follows the events of an open or ended turn from the first one. Dropping the handle does not
    /// affect the turn.
    pub(crate) async fn follow(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        turn: &str,
    ) -> Result<RunHandle, RuntimeError> {
        self.follow_as(agent, session, turn, Asks::Others).await
    }

    /// Does the same as [`Dispatch::follow`]. For another host, the turn is followed only if it is not with a third one.
    pub(crate) async fn follow_as(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        turn: &str,
        asks: Asks,
    ) -> Result<RunHandle, RuntimeError> {
        match self.locate(agent, session, turn, asks).await? {
            Located::Here(handle) => Ok(handle),
            Located::There(member, run) => {
                let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
                Ok(self.followed(key, member, run, true))
            }
        }
    }

    /// Returns the state of a turn.
    pub(crate) async fn turn(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        turn: &str,
    ) -> Result<TurnDetail, RuntimeError> {
        let TurnRow { id, accepted_at_ms, state, input, .. } = self.row(agent, session, turn).await?;
        Ok(TurnDetail { message: Input::message(&input), ..detail(session, id, accepted_at_ms, state)? })
    }

    /// Returns whether the row of a turn says that it is open, so that it ends later, whatever this host knows about it. One whose
    /// row cannot be read counts as open.
    pub(crate) async fn is_open(&self, agent: &str, session: &str, turn: &str) -> bool {
        match self.host.store.turn(agent, session, turn).await {
            Ok(row) => row.is_some_and(|row| row.is_open()),
            Err(_) => true,
        }
    }

    /// Returns the stored turns of a session, the newest first.
    pub(crate) async fn turns(
        &self,
        agent: &str,
        session: &str,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<TurnDetail>, RuntimeError> {
        self.host.deployments.find_known(agent).await?;
        let turns = self.host.store.turns_of_session(agent, session, before, limit).await?;
        let turns = turns.into_iter();
        turns
            .map(|ListedTurn { id, accepted_at_ms, state }| detail(session, id, accepted_at_ms, state))
            .collect()
    }

    /// Returns a turn and its timeline: the live one while the turn runs here, or the stored one.
    pub(crate) async fn timeline(
        &self,
        agent: &str,
        session: &str,
        turn: &str,
    ) -> Result<(TurnDetail, TurnTimeline), RuntimeError> {
        let TurnRow { key, id, accepted_at_ms, state, .. } = self.row(agent, session, turn).await?;
        let live = self.host.live.get(&id).map(|feed| feed.timeline().snapshot());
        let stored = self.host.store.turn_timeline(key).await?;
        // The timeline informs people only, so one that cannot be read is left out.
        let stored = stored.and_then(|stored| serde_json::from_slice(&stored).ok());
        let mut timeline: TurnTimeline = stored.or(live).unwrap_or_default();
        timeline.commit_us = self.host.live.commit_us(&id);
        Ok((detail(session, id, accepted_at_ms, state)?, timeline))
    }

    /// Cancels a turn that is waiting or running. A turn that has ended is left unchanged.
    pub(crate) async fn cancel_turn(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        turn: &str,
        asks: Asks,
    ) -> Result<(), RuntimeError> {
        let row = self.row(agent, session, turn).await?;
        if row.is_open() {
            self.admission.held.check(agent, session)?;
        }
        let live = || self.host.live.get(&row.id);
        if row.is_open() && live().is_none() {
            let Some(owned) = self.cancel_elsewhere(&row, asks).await? else { return Ok(()) };
            let left = self.adopt_turns(Some(agent)).await?;
            if left.iter().any(|open| open.id == row.id) {
                return self.end_unowned(agent, session, turn, owned).await;
            }
        }
        if let Some(feed) = live() {
            feed.cancel();
        }
        Ok(())
    }

    /// Ends a turn that nobody can run, because its agent cannot be called, as cancelled.
    async fn end_unowned(
        self: &Arc<Self>,
        agent: &str,
        session: &str,
        turn: &str,
        owned: Owned,
    ) -> Result<(), RuntimeError> {
        let feed = Feed::new(turn.to_owned());
        // Somebody else has begun to run or to end it.
        let Some(live) = self.host.live.enter(&feed, owned) else { return Ok(()) };
        let row = self.row(agent, session, turn).await?;
        if row.is_open() {
            let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
            let (host, error) = (&self.host, RuntimeError::Cancelled);
            Settlement::for_lost_turn(host, row.key, key, &error, live).await.write(host).await;
        }
        Ok(())
    }
}

impl Dispatch {
    async fn invoke_durably(
        self: Arc<Self>,
        invocation: Invocation,
        feed: Arc<Feed>,
        live: Arc<Live>,
    ) -> Result<RunHandle, RuntimeError> {
        let store = &self.host.store;
        let (agent, session) = (invocation.agent.clone(), invocation.session.clone());
        if let Some(key) = &invocation.idempotency_key {
            if let Some(row) = store.turn_with_idempotency_key(&agent, &session, key).await? {
                return self.follow_known(&invocation, row).await;
            }
            if let Some(kept) = store.outcome(&agent, &session, key).await? {
                return keyed::kept_answer(&feed, &invocation, &kept);
            }
        }
        // A session that accepts nothing new still returns earlier results.
        self.admission.held.check(&agent, &session)?;
        let deployed = self.host.deployments.agent(&agent)?;
        // Reserved before anything of the turn is stored.
        let admitted = self.admission.take(&deployed, &invocation)?;
        let (accepted_at_ms, seed) = (self.host.clock.now_ms(), journal::seed());
        let row = NewTurn {
            id: feed.turn_id().to_owned(),
            agent: agent.clone(),
            session: session.clone(),
            idempotency_key: invocation.idempotency_key.clone(),
            digest: deployed.digest.clone(),
            input: Input::encode(&invocation),
            seed: seed.clone(),
            accepted_at_ms,
            number: None,
        };
        let key = match store.accept_turn(row).await? {
            Acceptance::New(key) => key,
            Acceptance::Known(key) => match store.turn_by_key(key).await? {
                Some(row) => return self.follow_known(&invocation, row).await,
                None => return Err(RuntimeError::Cancelled),
            },
        };
        let handle = feed.follow(Hold::Watches);
        let state = StoredState::Waiting { key, seed };
        let session = session_key(&invocation);
        let message = in_memory(invocation, accepted_at_ms, state);
        let request = TurnRequest::new(message, feed, live.clone(), admitted);
        match self.enqueue(session.clone(), request) {
            Ok(_in_front) => Ok(handle),
            Err(error) => {
                Settlement::for_unstarted_turn(&self.host, key, session, &error, false, live)
                    .write(&self.host)
                    .await;
                Err(error)
            }
        }
    }

    fn enqueue(&self, key: SessionKey, request: TurnRequest) -> Result<SuspensionWatch, RuntimeError> {
        let owned = request.live.session().clone();
        self.sessions.send(&self.host, key, Command::Turn(Box::new(request)), owned)
    }

    /// Follows the turn that already has the invocation's idempotency key.
    async fn follow_known(&self, invocation: &Invocation, row: TurnRow) -> Result<RunHandle, RuntimeError> {
        check_same(invocation, &row)?;
        self.follow_row(row).await
    }

    async fn follow_row(&self, row: TurnRow) -> Result<RunHandle, RuntimeError> {
        let mut row = row;
        if row.is_open() {
            if let Some(feed) = self.host.live.get(&row.id) {
                return Ok(feed.follow(Hold::Watches));
            }
            self.admission.held.check(&row.agent, &row.session)?;
            // The turn may have ended since the row was read; the store then holds its complete
            // result.
            row = self.row(&row.agent, &row.session, &row.id).await?;
        }
        let feed = Feed::new(row.id.clone());
        match row.state {
            TurnState::Waiting | TurnState::Running { .. } => {
                self.adopt_turns(Some(&row.agent)).await?;
                if let Some(feed) = self.host.live.get(&row.id) {
                    return Ok(feed.follow(Hold::Watches));
                }
                let message =
                    format!("turn {} is waiting for its agent or for room in its session's mailbox", row.id);
                return Err(RuntimeError::MailboxFull { message, retry_after_ms: RETRY_AFTER_MS });
            }
            TurnState::Done { number, outcome, .. } => {
                let last = journal::republish_events(&feed, number, self.host.store.records(row.key).await?)?;
                feed.end(last + 1, Ok(decode_outcome(&outcome)?));
            }
            TurnState::Failed { error, .. } => {
                let StoredFailure { code, message } = StoredFailure::decode(&error)?;
                feed.end(0, Err(RuntimeError::TurnFailed { code: known_code(&code), message }));
            }
        }
        Ok(feed.follow(Hold::Watches))
    }

    /// Returns a turn by its id or by its number in the session.
    async fn row(&self, agent: &str, session: &str, turn: &str) -> Result<TurnRow, RuntimeError> {
        self.host.deployments.find_known(agent).await?;
        let store = &self.host.store;
        let row = match turn.parse() {
            Ok(number) if turn.len() < TURN_ID_LENGTH => store.turn_by_number(agent, session, number).await?,
            _ => store.turn(agent, session, turn).await?,
        };
        row.ok_or_else(|| RuntimeError::TurnNotFound {
            agent: agent.to_owned(),
            session: excerpt(plain_session(session)),
            turn: excerpt(turn),
        })
    }
}

/// Describes a stored turn.
fn detail(
    session: &str,
    id: String,
    accepted_at_ms: u64,
    state: TurnState,
) -> Result<TurnDetail, RuntimeError> {
    let phase = match state {
        TurnState::Waiting => TurnPhase::Waiting,
        TurnState::Running { number } => TurnPhase::Running { turn: number },
        TurnState::Done { outcome, ended_at_ms, .. } => {
            TurnPhase::Done { outcome: decode_outcome(&outcome)?, ended_at_ms }
        }
        TurnState::Failed { error, ended_at_ms } => {
            let StoredFailure { code, message } = StoredFailure::decode(&error)?;
            TurnPhase::Failed { code, message, ended_at_ms }
        }
    };
    Ok(TurnDetail { id, session: plain_session(session).to_owned(), accepted_at_ms, message: None, phase })
}

fn session_key(invocation: &Invocation) -> SessionKey {
    SessionKey { agent: invocation.agent.clone(), session: invocation.session.clone() }
}

/// Returns what identifies an agent in the choice of hosts.
fn digest_of(agent: &Agent, session: &str) -> AgentDigest {
    AgentDigest::of(tenant_of(session), agent.manifest.name.as_str(), &agent.digest)
}

fn in_memory(invocation: Invocation, received_at_ms: u64, state: StoredState) -> Message {
    Message::InMemory(Accepted { invocation: Box::new(invocation), received_at_ms, state })
}

/// Checks that a client's idempotency key is not one of the host's.
fn check_key(invocation: &Invocation) -> Result<(), RuntimeError> {
    if invocation.idempotency_key.as_ref().is_some_and(|key| key.chars().any(char::is_control)) {
        let message = "an idempotency key must not contain control characters".to_owned();
        return Err(RuntimeError::InvalidMessage { message });
    }
    Ok(())
}

/// Checks that the turn that has the invocation's idempotency key is that of the same message.
fn check_same(invocation: &Invocation, row: &TurnRow) -> Result<(), RuntimeError> {
    if invocation.has_key_of_host() || Input::is_same(&row.input, invocation) {
        return Ok(());
    }
    Err(keyed::used_otherwise())
}

fn check(invocation: &Invocation) -> Result<(), RuntimeError> {
    let invalid = |message: String| Err(RuntimeError::InvalidMessage { message });
    let bytes = invocation.text.len();
    if bytes > MAX_MESSAGE_BYTES {
        return invalid(format!("the text has {bytes} bytes; at most {MAX_MESSAGE_BYTES} are allowed"));
    }
    match &invocation.idempotency_key {
        Some(key) if key.is_empty() || key.len() > MAX_IDEMPOTENCY_KEY_BYTES => invalid(format!(
            "an idempotency key must have 1 to {MAX_IDEMPOTENCY_KEY_BYTES} bytes, not {}",
            key.len()
        )),
        _ => Ok(()),
    }
}

pub(crate) fn session_not_found(agent: &str, session: &str) -> RuntimeError {
    let session = plain_session(session).chars().take(128).collect();
    RuntimeError::SessionNotFound { agent: agent.to_owned(), session }
}
