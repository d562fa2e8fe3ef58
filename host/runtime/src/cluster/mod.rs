//! Several hosts on one database: which sessions this host owns, which other hosts exist, and how this host talks to them.
//!
//! A session is owned by at most one live host. A host claims a session in the database before it uses it, and remembers that it
//! owns it: the ownership ends only when the host gives the session back, or when the host is gone, and a host that is gone
//! writes nothing anymore. So a remembered ownership needs no lease of its own, and a session that a host owns costs no further
//! statement.
//!
//! Without a cluster, all of this is absent: each session belongs to this host, and nothing is written or waited for.
//!
//! The models of all hosts are one catalog: a generation of a model that this host lacks goes to a host that has it (`catalog`).
//!
//! This module knows neither turns nor actors. `dispatch` decides where a turn runs, and `agent_host` keeps what is known here
//! up to date.

mod catalog;
mod facts;
mod generation;
mod members;
mod ownership;
mod peers;
mod placing;

pub(crate) use catalog::ModelFacts;
pub(crate) use facts::Facts;
pub use facts::{HostRole, TokensInFlight};
pub use generation::{GenerationEvent, GenerationEvents, GenerationFailure, PeerGeneration};
pub use members::{ClusterHost, Member, WorkingHost};
pub(crate) use ownership::{Claimed, Owned, Ownership};
pub(crate) use peers::{PEER_KEY, failure, is_of_one_host, refusal};
pub use peers::{PeerError, PeerInvocation, Peers, RemoteEvent, RemoteEvents, RemoteRun, TurnAddress};

use crate::{
    RuntimeError,
    name::{SessionKey, plain_session},
    placement::{AgentDigest, Choice, Placement},
};
use catalog::{Catalog, DEFAULT_MODEL, first_model};
use members::{KnownHost, Members};
use placing::Placing;
use skep_engine::{ModelSet, OtherModels};
use skep_store::{HostRow, HostState, Store, StoreError};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::sync::watch;

/// Time for which a request waits for an owner that is about to be found dead.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);
/// Time for which a request waits for an owner that drains: its turn may take as long as its host waits for it.
pub(crate) const DRAIN_PATIENCE: Duration = Duration::from_secs(120);
/// Shortest and longest interval between two looks at an owner that drains or is about to be found dead.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(50);
pub(crate) const LONGEST_POLL_INTERVAL: Duration = Duration::from_millis(500);

/// The host to which requests for a session go.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionPlace {
    Here,
    There(Member),
}

/// Amounts that the hosts of a cluster count together, such as the requests of a tenant. Each host reports what was counted at it,
/// and learns every half second what the others report.
pub trait SharedCounts: Send + Sync + 'static {
    /// Returns the amounts of this host, by names that mean the same on all hosts. They only grow; one that did not grow for a
    /// while is left out, and begins at zero later.
    fn own(&self) -> BTreeMap<String, u64>;

    /// Notes the amounts that the other hosts report, by their numbers.
    fn note(&self, reports: Vec<(i64, BTreeMap<String, u64>)>);
}

/// The other hosts of the cluster, as of the last look. It keeps nothing of this host running.
#[derive(Clone)]
pub struct OtherHosts(Cluster);

impl OtherHosts {
    /// Returns the hosts that give KV pages, those included that hand their sessions over.
    pub fn with_pages(&self) -> Vec<Member> {
        self.0.shared.as_ref().map(|shared| shared.members.with_pages(shared.own)).unwrap_or_default()
    }

    /// Returns the hosts that compute prompts of a model for others.
    pub fn with_prefill(&self, model: &str) -> Vec<WorkingHost> {
        let shared = self.0.shared.as_ref();
        shared.map(|shared| shared.members.with_prefill(shared.own, model)).unwrap_or_default()
    }

    /// Returns the hosts that run agents and answer clients.
    pub fn with_agents(&self) -> Vec<WorkingHost> {
        self.0.shared.as_ref().map(|shared| shared.members.with_agents(shared.own)).unwrap_or_default()
    }
}

/// The cluster as this host sees it. Clones share it.
#[derive(Clone)]
pub(crate) struct Cluster {
    pub(crate) ownership: Ownership,
    shared: Option<Arc<Shared>>,
}

/// The part that a host takes in its cluster, and the ways to the other hosts.
pub(crate) struct Part {
    pub(crate) role: HostRole,
    /// Whether the host gives KV pages to others.
    pub(crate) gives_pages: bool,
    /// The default of a host without a default of its own. `None` takes the one that the cluster chooses.
    pub(crate) default_model: Option<String>,
    pub(crate) peers: Option<Arc<dyn Peers>>,
    pub(crate) counts: Option<Arc<dyn SharedCounts>>,
    /// Maximum number of sessions that are remembered although nobody uses them.
    pub(crate) max_owned: usize,
    /// The place where sessions begin.
    pub(crate) placement: Placement,
}

struct Shared {
    store: Store,
    /// The number of this host.
    own: i64,
    role: HostRole,
    gives_pages: bool,
    /// Models of other hosts hold them, too, and not the connections of the database.
    members: Arc<Members>,
    catalog: Catalog,
    peers: Arc<dyn Peers>,
    counts: Option<Arc<dyn SharedCounts>>,
    placing: Placing,
    draining: watch::Sender<bool>,
}

impl Shared {
    /// Learns which default model the cluster has chosen, or chooses one as soon as a host has models.
    async fn choose_default(&self) -> Result<(), StoreError> {
        if !self.catalog.lacks_default() {
            return Ok(());
        }
        let hosts = self.members.hosts();
        let chosen = match (self.store.choice(DEFAULT_MODEL).await?, first_model(&hosts)) {
            (Some(chosen), _) => chosen,
            (None, Some(first)) => self.store.choose(DEFAULT_MODEL, first).await?,
            (None, None) => return Ok(()),
        };
        self.catalog.set_default(chosen);
        Ok(())
    }
}

impl Cluster {
    /// Returns the cluster of a host that works on this database, or that of a single host.
    pub(crate) fn new(store: &Store, part: Part) -> Result<Self, RuntimeError> {
        let Part { role, gives_pages, default_model, peers, counts, max_owned, placement } = part;
        if !store.is_clustered() {
            return Ok(Cluster { ownership: Ownership::of_all(), shared: None });
        }
        let (Some(peers), Some(own)) = (peers, store.host_number()) else {
            let message =
                "a host of a cluster needs its number and a way to reach the other hosts".to_owned();
            return Err(RuntimeError::Internal { message });
        };
        let ownership = Ownership::of_claimed(store.clone(), max_owned);
        let shared = Shared {
            store: store.clone(),
            own,
            role,
            gives_pages,
            members: Arc::default(),
            catalog: Catalog::new(default_model),
            peers,
            counts,
            placing: Placing::new(placement),
            draining: watch::Sender::new(false),
        };
        Ok(Cluster { ownership, shared: Some(Arc::new(shared)) })
    }

    pub(crate) fn is_clustered(&self) -> bool {
        self.shared.is_some()
    }

    /// Returns the other hosts; none without a cluster.
    pub(crate) fn others(&self) -> OtherHosts {
        OtherHosts(self.clone())
    }

    /// Returns the number of this host; 0 without a cluster.
    pub(crate) fn own_number(&self) -> i64 {
        self.shared.as_ref().map_or(0, |shared| shared.own)
    }

    /// Returns the part that this host takes in its cluster.
    pub(crate) fn role(&self) -> HostRole {
        self.shared.as_ref().map_or(HostRole::All, |shared| shared.role)
    }

    /// Returns whether this host gives KV pages to others.
    pub(crate) fn gives_pages(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.gives_pages)
    }

    /// Returns the models of the other hosts that this one lacks, as of the last refresh; `None` if they have not changed since the
    /// last call.
    pub(crate) fn other_models(&self, models: &ModelSet) -> Option<OtherModels> {
        let shared = self.shared.as_ref()?;
        shared.catalog.look(shared.own, models, &shared.members, &shared.peers)
    }

    /// Returns the way to the other hosts.
    pub(crate) fn peers(&self) -> Option<&Arc<dyn Peers>> {
        self.shared.as_ref().map(|shared| &shared.peers)
    }

    /// Reports this host to the others, and marks hosts that are dead.
    pub(crate) async fn meet(&self, facts: &Facts) -> Result<(), StoreError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        shared.placing.set_load(facts.load);
        let marked = shared.store.meet_hosts(&facts.encode(), self.is_draining()).await?;
        if !marked.is_empty() {
            shared.members.note_loss();
        }
        self.refresh().await?;
        if let Some(counts) = &shared.counts {
            let hosts = shared.members.hosts();
            let others = hosts.iter().filter(|host| host.row.number != shared.own);
            let report = |host: &KnownHost| Some((host.row.number, host.facts.as_ref()?.counts.clone()));
            counts.note(others.filter_map(report).collect());
        }
        Ok(())
    }

    /// Returns what this host reports of amounts that all hosts count together.
    pub(crate) fn own_counts(&self) -> BTreeMap<String, u64> {
        let counts = self.shared.as_ref().and_then(|shared| shared.counts.as_ref());
        counts.map(|counts| counts.own()).unwrap_or_default()
    }

    /// Reads which hosts there are.
    pub(crate) async fn refresh(&self) -> Result<(), StoreError> {
        let Some(shared) = &self.shared else { return Ok(()) };
        let look = shared.members.look();
        look.end(shared.store.members().await?);
        shared.placing.set_others(shared.members.reports(shared.own, shared.placing.now_ms()));
        shared.choose_default().await
    }

    /// Returns whether a host is gone whose work was not looked for since the last call.
    pub(crate) fn take_loss(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.members.take_loss())
    }

    /// Makes the work of hosts that are gone be looked for again, because the last attempt failed.
    pub(crate) fn note_loss(&self) {
        if let Some(shared) = &self.shared {
            shared.members.note_loss();
        }
    }

    /// Returns all hosts as of the last refresh, by number.
    pub(crate) fn hosts(&self) -> Vec<HostRow> {
        let hosts = self.shared.as_ref().map(|shared| shared.members.hosts()).unwrap_or_default();
        hosts.iter().map(|host| host.row.clone()).collect()
    }

    /// Returns a host that was there at the last refresh, and its state.
    pub(crate) fn find(&self, number: i64) -> Option<(Member, HostState)> {
        let hosts = self.shared.as_ref()?.members.hosts();
        let KnownHost { row, .. } = hosts.iter().find(|host| host.row.number == number)?;
        Some((Member::of(row), row.state.clone()))
    }

    /// Returns whether another host hands its sessions over.
    pub(crate) fn has_other_draining(&self) -> bool {
        let Some(shared) = &self.shared else { return false };
        let is_draining = |host: &KnownHost| host.row.state == HostState::Draining;
        shared.members.hosts().iter().any(|host| host.row.number != shared.own && is_draining(host))
    }

    /// Returns whether another host serves.
    pub(crate) fn has_other_serving(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| shared.members.has_other_serving(shared.own))
    }

    /// Returns the addresses of the other hosts that serve and have not reported this version of the agents yet.
    pub(crate) fn behind(&self, agents: i64) -> Vec<String> {
        self.shared.as_ref().map(|shared| shared.members.behind(shared.own, agents)).unwrap_or_default()
    }

    /// Returns whether no other host that serves has a lower number than this one.
    pub(crate) fn is_first(&self) -> bool {
        let Some(shared) = &self.shared else { return true };
        let is_before = |host: &KnownHost| {
            let KnownHost { row, .. } = host;
            row.number < shared.own && row.state == HostState::Serving && host.role().runs_agents()
        };
        shared.role.runs_agents() && !shared.members.hosts().iter().any(is_before)
    }

    /// Makes this host hand its sessions over.
    pub(crate) fn begin_draining(&self) {
        if let Some(shared) = &self.shared {
            shared.draining.send_replace(true);
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        self.shared.as_ref().is_some_and(|shared| *shared.draining.borrow())
    }

    /// Returns whether this host takes no new work, because it never runs agents, or because it drains and another host serves. The
    /// last host has nobody to hand over to, and continues to work while it drains.
    pub(crate) fn hands_over(&self) -> bool {
        let Some(shared) = &self.shared else { return false };
        !shared.role.runs_agents() || (self.is_draining() && shared.members.has_other_serving(shared.own))
    }

    /// Returns the other host that gets the requests for a session while this one hands over. All hosts choose the same one.
    pub(crate) fn successor(&self, key: &SessionKey) -> Option<Member> {
        let shared = self.shared.as_ref()?;
        shared.members.chosen(shared.own, key)
    }

    /// Chooses the host at which a session without an owner begins. `running` of the `open` turns of this host have an
    /// instance. `None` without a cluster.
    pub(crate) fn choose(
        &self,
        key: &SessionKey,
        agent: AgentDigest,
        running: usize,
        open: usize,
    ) -> Option<Choice> {
        let shared = self.shared.as_ref()?;
        let bounded = |number: usize| u32::try_from(number).unwrap_or(u32::MAX);
        // The turns of sessions that have just begun here may have no instance yet.
        let begun = shared.placing.sent(shared.own);
        let running = bounded(running).saturating_add(begun).min(bounded(open));
        Some(shared.placing.choose(key, agent, running))
    }

    /// Counts a session that begins at a host, this one included, because of such a choice.
    pub(crate) fn note_sent(&self, host: i64) {
        if let Some(shared) = &self.shared {
            shared.placing.note_sent(host);
        }
    }

    /// Makes sessions begin elsewhere for a while, because a message did not get to this host.
    pub(crate) fn avoid(&self, host: i64) {
        if let Some(shared) = &self.shared {
            shared.placing.avoid(host);
        }
    }

    /// Records that a turn of an agent begins at this host. The digest is only made in a cluster.
    pub(crate) fn note_turn(&self, agent: impl FnOnce() -> AgentDigest) {
        if let Some(shared) = &self.shared {
            shared.placing.note_turn(agent());
        }
    }

    /// Returns the agents that this host reports as warm.
    pub(crate) fn warm_agents(&self) -> Vec<AgentDigest> {
        self.shared.as_ref().map(|shared| shared.placing.warm()).unwrap_or_default()
    }

    /// Returns the error for a session that belongs to another host.
    pub(crate) fn elsewhere(key: &SessionKey, host: i64) -> RuntimeError {
        let session = plain_session(&key.session).to_owned();
        RuntimeError::SessionElsewhere { agent: key.agent.clone(), session, host }
    }
}
