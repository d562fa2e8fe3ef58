//! Turns that are open in the store and that nobody runs: those that the last process left, and those whose owner was lost
//! to a fault. They are taken up when the host starts, when their agent is deployed, when somebody asks for one, and from
//! time to time.
//!
//! Whoever takes one up first holds it among the live turns, then reads its row: one that has ended meanwhile is left alone.

use super::{AgentHost, Inner, Services};
use crate::{
    RuntimeError,
    capability::log::now_ms,
    feed::Feed,
    host_tools::CALL_KEY,
    session::{Message, SessionKey, Settlement, StoredFailure, TurnRequest},
};
use skep_store::{OpenTurn, TurnFailure};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// How often the host looks for turns that nobody runs.
const INTERVAL: Duration = Duration::from_secs(5);
/// A turn under which the process died so often without getting any further, or its session's actor panicked so often, is
/// given up: it may be the reason.
const MAX_LOSSES: u32 = 3;

/// Until the host ends.
pub(super) async fn run(services: Arc<Services>) {
    let mut ticks = interval_at(Instant::now() + INTERVAL, INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = services.closing() => return,
        }
        let Some(host) = services.host() else { continue };
        if let Err(error) = host.inner.adopt_turns(None).await {
            tracing::error!("turns that nobody runs cannot be looked for: {error}");
        }
    }
}

impl AgentHost {
    /// At the start, after the turns of the last process were counted: those that cannot go on yet are named.
    pub(super) async fn resume_turns(&self) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        services.store.count_losses(CALL_KEY).await?;
        self.inner.adopt_turns(None).await?;
        for OpenTurn { id, agent, session, .. } in services.store.open_turns().await? {
            if services.agent(&agent).is_err() {
                tracing::warn!(agent, session, turn = id, "the turn waits: its agent cannot be called");
            }
        }
        Ok(())
    }
}

impl Inner {
    /// Goes on with the turns that nobody runs: of all agents that are ready, or of this one.
    pub(super) async fn adopt_turns(&self, agent: Option<&str>) -> Result<(), RuntimeError> {
        let services = &self.services;
        if services.admit().is_err() {
            return Ok(());
        }
        let mut sessions: BTreeMap<SessionKey, Vec<TurnRequest>> = BTreeMap::new();
        for turn in services.store.open_turns().await? {
            if agent.is_some_and(|agent| agent != turn.agent) || services.agent(&turn.agent).is_err() {
                continue;
            }
            let feed = Feed::new(turn.id.clone());
            let Some(live) = services.live.enter(&feed) else { continue };
            let losses = turn.losses.max(services.live.panics(&turn.id));
            if turn.is_running && losses >= MAX_LOSSES {
                let failure = given_up(turn, losses);
                Settlement { failure, spend: None, live }.write(services).await;
                continue;
            }
            let OpenTurn { key, agent, session, .. } = turn;
            let active = services.active_again(&agent);
            let request = TurnRequest::new(Message::Stored(key), feed, live, active);
            sessions.entry(SessionKey { agent, session }).or_default().push(request);
        }
        for (key, turns) in sessions {
            self.sessions.resume(services, key, turns);
        }
        Ok(())
    }
}

fn given_up(turn: OpenTurn, losses: u32) -> TurnFailure {
    let OpenTurn { key, id, agent, session, .. } = turn;
    let error = RuntimeError::TurnLost { turn: id, losses };
    tracing::error!(agent, session, "{error}");
    TurnFailure {
        key,
        agent,
        session,
        number: 0,
        at_ms: now_ms(),
        error: StoredFailure::encode(&error),
        keeps_key: true,
        logs: Vec::new(),
        events: Vec::new(),
        token_use: None,
    }
}
