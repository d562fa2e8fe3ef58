//! Adopts turns that are open in the store and that nobody runs: those that the last process left,
//! and those whose owner was lost to a bug. They are adopted when the host starts, when their agent
//! is deployed, when a caller asks for one, and periodically.
//!
//! The host first registers a turn among the live turns, then reads its row; a turn that has ended
//! meanwhile is left alone.

use super::{AgentHost, Inner, Services};
use crate::{
    RuntimeError,
    feed::Feed,
    invocation::CALL_KEY,
    name::{SessionKey, tenant_of},
    session::{Message, Settlement, TurnRequest},
};
use skep_store::OpenTurn;
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// Interval at which the host looks for turns that nobody runs.
const INTERVAL: Duration = Duration::from_secs(5);
/// A turn fails permanently after its process died this many times without progress, or its
/// session's actor panicked this many times, because the turn may be the cause.
const MAX_LOSSES: u32 = 3;

/// Runs until the host stops.
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
            tracing::error!("cannot look for turns that nobody runs: {error}");
        }
    }
}

impl AgentHost {
    /// Resumes the turns of the last process at startup, after counting their losses. Logs those
    /// that cannot continue yet.
    pub(super) async fn resume_turns(&self) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        services.store.count_losses(CALL_KEY).await?;
        for OpenTurn { id, agent, session, .. } in self.inner.adopt_turns(None).await? {
            tracing::warn!(
                agent,
                session,
                turn = id,
                "the turn is waiting because its agent cannot be called"
            );
        }
        Ok(())
    }
}

impl Inner {
    /// Resumes the turns that nobody runs, of all agents or of the given one. Returns those whose
    /// agent is not ready.
    pub(super) async fn adopt_turns(&self, agent: Option<&str>) -> Result<Vec<OpenTurn>, RuntimeError> {
        let services = &self.services;
        let mut left = Vec::new();
        if services.admit().is_err() {
            return Ok(left);
        }
        let mut sessions: BTreeMap<SessionKey, Vec<TurnRequest>> = BTreeMap::new();
        for turn in services.store.open_turns().await? {
            if agent.is_some_and(|agent| agent != turn.agent) {
                continue;
            }
            if services.agent(&turn.agent).is_err() {
                left.push(turn);
                continue;
            }
            let feed = Feed::new(turn.id.clone());
            let Some(live) = services.live.enter(&feed) else { continue };
            let losses = turn.losses.max(services.live.panics(&turn.id));
            let OpenTurn { key, id, agent, session, is_running, message_bytes, .. } = turn;
            if is_running && losses >= MAX_LOSSES {
                let error = RuntimeError::TurnLost { turn: id, losses };
                tracing::error!(agent, session, "{error}");
                let place = SessionKey { agent, session };
                Settlement::of_lost(services, key, place, &error, live).await.write(services).await;
                continue;
            }
            let place = SessionKey { agent, session };
            let tenant = tenant_of(&place.session).to_owned();
            let active = services.active_again(&place.agent, &tenant);
            let held = services.intake.take_again(tenant, place.clone(), message_bytes as usize);
            let request = TurnRequest::new(Message::Stored(key), feed, live, active, held);
            sessions.entry(place).or_default().push(request);
        }
        for (key, turns) in sessions {
            self.sessions.resume(services, key, turns);
        }
        Ok(left)
    }
}
