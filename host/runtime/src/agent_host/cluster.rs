//! The cluster of this host: its hosts, where requests for a session go, and the handing over of all sessions.

use super::{AgentHost, Inner, membership, notices};
use crate::{
    ClusterHost, GenerationEvent, Invocation, OtherHosts, PeerGeneration, RunHandle, RuntimeError,
    SessionPlace, cluster::Cluster, dispatch::Asks, name::SessionKey,
};
use futures::{StreamExt, stream, stream::BoxStream};
use skep_engine::{
    EngineError,
    chat::{ChatEvent, Input},
};
use skep_store::{HostState, HostVersions, NoticeKind, Notices};
use std::{
    collections::HashSet,
    sync::{Arc, PoisonError},
    time::{Duration, Instant},
};

/// Interval at which a host that hands over looks for sessions that are free.
const RELEASE_INTERVAL: Duration = Duration::from_millis(20);
/// Interval at which a host looks whether the others have started an agent.
const CONFIRMING_INTERVAL: Duration = Duration::from_millis(100);

impl AgentHost {
    /// Returns whether this host is one of several on its database.
    pub fn is_clustered(&self) -> bool {
        self.host().cluster.is_clustered()
    }

    /// Returns the hosts of the cluster that are not gone, by number; without a cluster, only this host.
    pub async fn cluster_hosts(&self) -> Result<Vec<ClusterHost>, RuntimeError> {
        let cluster = &self.host().cluster;
        if cluster.is_clustered() {
            let hosts = self.host().store.live_hosts().await?;
            // Once a host is listed as one that drains, nothing new is sent to it.
            cluster.refresh().await?;
            return Ok(hosts.into_iter().map(|row| ClusterHost::of(row, cluster.own_number())).collect());
        }
        let facts = self.inner.facts();
        Ok(vec![ClusterHost {
            number: 0,
            url: String::new(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            versions: HostVersions::OWN,
            is_draining: self.host().shutdown.admit().is_err(),
            is_this: true,
            started_at_ms: self.inner.started_at_ms,
            seen_ms_ago: 0,
            lease_left_ms: None,
            role: facts.role,
            models: facts.models,
            sessions: self.loaded_sessions() as u64,
            running_turns: facts.running_turns,
            load_percent: facts.load.percent(),
            waiting_requests: u64::from(facts.load.waiting),
            tokens: facts.tokens,
        }])
    }

    /// Returns the numbers of the hosts of the cluster that are not gone. It costs less than [`AgentHost::cluster_hosts`].
    pub async fn live_hosts(&self) -> Result<HashSet<i64>, RuntimeError> {
        let cluster = &self.host().cluster;
        cluster.refresh().await?;
        Ok(cluster.hosts().iter().map(|row| row.number).collect())
    }

    /// Waits until the other hosts of the cluster have started the agents as they are stored now, and no longer than this time. Returns
    /// the addresses of those that have not reported it.
    pub async fn hosts_behind(&self, patience: Duration) -> Result<Vec<String>, RuntimeError> {
        let cluster = &self.host().cluster;
        if !cluster.has_other_serving() {
            return Ok(Vec::new());
        }
        let version = self.host().store.notice_version(NoticeKind::Agents).await?;
        let until = Instant::now() + patience;
        loop {
            cluster.refresh().await?;
            let behind = cluster.behind(version);
            if behind.is_empty() || Instant::now() >= until {
                return Ok(behind);
            }
            tokio::time::sleep(CONFIRMING_INTERVAL).await;
        }
    }

    /// Returns the other hosts of the cluster, for callers that ask them for something.
    pub fn other_hosts(&self) -> OtherHosts {
        self.host().cluster.others()
    }

    /// Returns where requests for a session go. This is known at once if this host owns the session.
    pub async fn place_of(&self, agent: &str, session: &str) -> Result<SessionPlace, RuntimeError> {
        self.inner.place_of(agent, session, false).await
    }

    /// Returns where requests for an approval go: to the host that runs its turn, also while that host drains, because only there a
    /// decision wakes the turn at once.
    pub async fn place_of_approval(&self, id: &str) -> Result<SessionPlace, RuntimeError> {
        if !self.is_clustered() {
            return Ok(SessionPlace::Here);
        }
        match self.host().store.session_of_approval(id).await? {
            Some((agent, session)) => self.inner.place_of(&agent, &session, true).await,
            // The error says that there is none.
            None => Ok(SessionPlace::Here),
        }
    }

    /// Does the same as [`AgentHost::invoke`] for another host of the cluster. Idempotency keys of the host are allowed. Fails with
    /// [`RuntimeError::SessionElsewhere`] if a third host owns the session.
    pub async fn invoke_here(&self, invocation: Invocation) -> Result<RunHandle, RuntimeError> {
        self.inner.dispatch.invoke_here(invocation).await
    }

    /// Does the same as [`AgentHost::follow`] for another host of the cluster. Fails with [`RuntimeError::SessionElsewhere`] if a
    /// third host owns the session.
    pub async fn follow_here(
        &self,
        agent: &str,
        session: &str,
        turn: &str,
    ) -> Result<RunHandle, RuntimeError> {
        self.inner.dispatch.follow_as(agent, session, turn, Asks::Nobody).await
    }

    /// Does the same as [`AgentHost::cancel_turn`] for another host of the cluster. Fails with [`RuntimeError::SessionElsewhere`] if
    /// a third host owns the session.
    pub async fn cancel_here(&self, agent: &str, session: &str, turn: &str) -> Result<(), RuntimeError> {
        self.inner.dispatch.cancel_turn(agent, session, turn, Asks::Nobody).await
    }

    /// Answers another host of the cluster with a model that this host computes, and never passes the question on. The host
    /// that asks has checked who may use the model, and counts the use; here, only the engine's meter counts it.
    pub fn generate_here(&self, generation: PeerGeneration) -> BoxStream<'static, GenerationEvent> {
        let (name, input, options) = generation.into_parts();
        let begin = || {
            self.host().shutdown.admit().map_err(|_| EngineError::ShuttingDown)?;
            let Some(model) = self.models().computed_here(&name) else {
                return Err(EngineError::ModelUnknown { name: name.clone(), known: Vec::new() });
            };
            match &input {
                Input::Messages(messages) => model.chat(messages, options),
                Input::Text(text) => model.complete(text, options),
            }
        };
        match begin() {
            Ok(answer) => answer.map(generation_event).boxed(),
            Err(error) => stream::iter([GenerationEvent::Failed(error.into())]).boxed(),
        }
    }

    /// Returns whether this host hands its sessions over, or has done so.
    pub fn is_draining(&self) -> bool {
        self.host().cluster.is_draining()
    }

    /// Hands all sessions over to the other hosts of the cluster: idle ones at once, and busy ones after the messages that they have.
    /// New messages go to another host, which waits for the session. Resolves when only sessions are left whose turns wait for people
    /// (they continue on another host once this one has ended), when no other host serves, or at the deadline. The host still answers
    /// afterwards, until [`AgentHost::drain`].
    pub async fn hand_over(&self, deadline: Duration) {
        let (inner, cluster) = (&self.inner, &self.host().cluster);
        if !cluster.is_clustered() {
            return;
        }
        let until = Instant::now().checked_add(deadline);
        cluster.begin_draining();
        // The others do not send anything new from here on.
        if let Err(error) = inner.meet().await {
            tracing::warn!("cannot report to the other hosts yet that this one drains: {error}");
        }
        if !cluster.hands_over() {
            tracing::info!("no other host serves, so this one keeps its sessions");
            return;
        }
        tracing::info!(sessions = cluster.ownership.count(), "handing all sessions over");
        // Other hosts take the items that are given back.
        inner.batches.stop().await;
        while cluster.hands_over() && until.is_none_or(|until| Instant::now() < until) {
            inner.dispatch.release(usize::MAX).await;
            if inner.has_handed_over() {
                break;
            }
            tokio::time::sleep(RELEASE_INTERVAL).await;
        }
        tracing::info!(left = cluster.ownership.count(), "handed the sessions over");
    }

    /// Starts the tasks of a host of a cluster.
    pub(super) fn join_cluster(&self, notices: Notices) {
        let mut tasks = self.inner.cluster_tasks.lock().unwrap_or_else(PoisonError::into_inner);
        tasks.spawn(membership::run(Arc::downgrade(&self.inner)));
        tasks.spawn(notices::run(Arc::downgrade(&self.inner), notices));
    }
}

impl Inner {
    /// Returns where requests for a session go. One for the turn that runs, which `follows` it, goes to an owner that drains, too.
    async fn place_of(
        &self,
        agent: &str,
        session: &str,
        follows: bool,
    ) -> Result<SessionPlace, RuntimeError> {
        let cluster = &self.dispatch.host.cluster;
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        // While this host drains, it answers requests for what it still owns.
        if !cluster.is_clustered() || cluster.ownership.owns(&key) {
            return Ok(SessionPlace::Here);
        }
        let owner = self.dispatch.host.store.owner_of(agent, session).await?;
        if owner == Some(cluster.own_number()) {
            return Ok(SessionPlace::Here);
        }
        let found = owner.and_then(|owner| cluster.find(owner));
        match found {
            Some((member, HostState::Serving)) => Ok(SessionPlace::There(member)),
            Some((member, _)) if follows => Ok(SessionPlace::There(member)),
            // Nobody owns it, or its owner lets go of it or is about to be found dead.
            _ => Ok(place_without_owner(cluster, &key)),
        }
    }

    /// Returns whether nothing is left that another host can continue before this one has ended.
    fn has_handed_over(&self) -> bool {
        let host = &self.dispatch.host;
        let owned = host.cluster.ownership.sessions();
        owned.iter().all(|key| self.dispatch.sessions.is_suspended(key)) && host.live.depending() == 0
    }
}

fn generation_event(event: Result<ChatEvent, EngineError>) -> GenerationEvent {
    match event {
        Ok(event) => GenerationEvent::Event(Box::new(event)),
        Err(error) => GenerationEvent::Failed(error.into()),
    }
}

/// Returns where requests for a session go that no host owns for long.
fn place_without_owner(cluster: &Cluster, key: &SessionKey) -> SessionPlace {
    let successor = if cluster.hands_over() { cluster.successor(key) } else { None };
    successor.map_or(SessionPlace::Here, SessionPlace::There)
}
