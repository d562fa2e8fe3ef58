//! Adopts turns that are open in the store and that no host runs: those that the last process left, and those whose owner
//! was lost to a bug. They are adopted when the host starts, when their agent is deployed, when a caller asks for one, and
//! periodically. In a cluster, a host adopts only turns of sessions that it owns; it takes over sessions whose owner is
//! gone.
//!
//! The host first registers a turn among the live turns, then reads its row; a turn that has ended
//! meanwhile is left alone.

use super::Dispatch;
use crate::{
    RuntimeError,
    cluster::Claimed,
    feed::Feed,
    invocation::CALL_KEY,
    journal::NO_PROGRESS,
    name::{SessionKey, tenant_of},
    session::{Message, Settlement, TurnHost, TurnRequest},
    shutdown::Shutdown,
};
use skep_store::OpenTurn;
use std::{collections::BTreeMap, sync::Weak, time::Duration};
use tokio::time::{Instant, MissedTickBehavior, interval_at};

/// Interval at which the host looks for turns without an owner.
const INTERVAL: Duration = Duration::from_secs(5);
/// A turn fails permanently after its process died this many times without progress, or its
/// session's actor panicked this many times, because the turn may be the cause.
const MAX_LOSSES: u32 = 3;
/// Number of sessions that are taken over in one transaction: by the only host that is left, and by one of several, each of which
/// gets a share.
const TAKEN_AT_ONCE: u32 = 256;
const SHARE: u32 = 64;
/// Time for the others to take their share.
const SHARE_PAUSE: Duration = Duration::from_millis(50);

/// Runs until the host stops.
pub(crate) async fn run(dispatch: Weak<Dispatch>, shutdown: Shutdown) {
    let mut ticks = interval_at(Instant::now() + INTERVAL, INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            _ = ticks.tick() => {}
            () = shutdown.begun() => return,
        }
        let Some(dispatch) = dispatch.upgrade() else { return };
        let adopted = async {
            dispatch.take_over().await?;
            dispatch.adopt_turns(None).await
        };
        if let Err(error) = adopted.await {
            tracing::error!("cannot look for turns without an owner: {error}");
        }
    }
}

impl Dispatch {
    /// Resumes the turns of the last process at startup, after counting their losses. Logs those
    /// that cannot continue yet.
    pub(crate) async fn resume_turns(&self) -> Result<(), RuntimeError> {
        self.host.store.count_losses(CALL_KEY, &NO_PROGRESS).await?;
        self.take_over().await?;
        for OpenTurn { id, agent, session, .. } in self.adopt_turns(None).await? {
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

impl Dispatch {
    /// Takes over the sessions with open turns that no live host owns. Their turns can be adopted afterwards.
    pub(crate) async fn take_over(&self) -> Result<(), RuntimeError> {
        let TurnHost { store, cluster, shutdown, .. } = &*self.host;
        if !cluster.is_clustered() {
            return Ok(());
        }
        let mut count = 0;
        while shutdown.admit().is_ok() && !cluster.hands_over() {
            let is_shared = cluster.has_other_serving();
            let limit = if is_shared { SHARE } else { TAKEN_AT_ONCE };
            let taken = store.take_over(CALL_KEY, &NO_PROGRESS, limit).await?;
            if taken.is_empty() {
                break;
            }
            let has_more = taken.len() == limit as usize;
            count += taken.len();
            cluster.ownership.took_over(taken);
            if is_shared && has_more {
                tokio::time::sleep(SHARE_PAUSE).await;
            }
        }
        if count > 0 {
            tracing::info!(sessions = count, "took over sessions with open turns");
        }
        Ok(())
    }

    /// Resumes the turns without an owner, of all agents or of the given one. Returns those whose
    /// agent is not ready.
    pub(crate) async fn adopt_turns(&self, agent: Option<&str>) -> Result<Vec<OpenTurn>, RuntimeError> {
        let host = &self.host;
        let mut left = Vec::new();
        if host.shutdown.admit().is_err() || host.cluster.hands_over() {
            return Ok(left);
        }
        let mut sessions: BTreeMap<SessionKey, Vec<TurnRequest>> = BTreeMap::new();
        for turn in host.store.open_turns().await? {
            if agent.is_some_and(|agent| agent != turn.agent) {
                continue;
            }
            if host.deployments.agent(&turn.agent).is_err() {
                left.push(turn);
                continue;
            }
            let losses = turn.losses.max(host.live.panics(&turn.id));
            let OpenTurn { key, id, agent, session, is_running, message_bytes, .. } = turn;
            let session = SessionKey { agent, session };
            // The session may have been given back since its turns were read.
            let Claimed::Here(owned) = host.cluster.ownership.claim(&session).await? else { continue };
            let feed = Feed::new(id.clone());
            let Some(live) = host.live.enter(&feed, owned) else { continue };
            if is_running && losses >= MAX_LOSSES {
                let error = RuntimeError::TurnLost { turn: id, losses };
                let SessionKey { agent, session: name } = &session;
                tracing::error!(agent, session = name, "{error}");
                Settlement::for_lost_turn(host, key, session, &error, live).await.write(host).await;
                continue;
            }
            let tenant = tenant_of(&session.session).to_owned();
            let admitted = self.admission.take_again(&tenant, &session, message_bytes as usize);
            let request = TurnRequest::new(Message::Stored(key), feed, live, admitted);
            sessions.entry(session).or_default().push(request);
        }
        for (key, turns) in sessions {
            self.sessions.resume(host, key, turns);
        }
        Ok(left)
    }
}
