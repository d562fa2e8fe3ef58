//! The deployed agents of a host.

use crate::{
    AgentSummary, FailedAgent, Manifest, RouteMatch, RuntimeError,
    agent::Agent,
    agent_log::AgentLog,
    capability::tools::Directory,
    component::{Compiler, Deployed, Prepared, Source},
    event::Outbox,
    guest::Instances,
    name::OPERATOR,
    text::excerpt,
};
use skep_engine::ModelSet;
use skep_store::{Store, VersionRow};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, PoisonError, RwLock, RwLockReadGuard,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};
use tokio::{sync::watch, task::JoinSet};

/// An agent, addressed by its name.
#[derive(Clone)]
enum Slot {
    Ready(Arc<Deployed>),
    /// The agent is stored but cannot be called.
    Failed(NotStarted),
}

/// The version of an agent and the time of its deployment. Versions are counted from 1 again when a deleted agent is deployed again,
/// so only both together identify what is deployed.
type Identity = (u64, u64);

/// The changes that other hosts made to the set of agents.
#[derive(Default)]
pub(crate) struct StoredChanges {
    /// Agents that are no longer stored, or were deleted and deployed again. Their sessions are gone.
    pub(crate) removed: Vec<String>,
    /// The active versions that are not the ones in memory.
    pub(crate) rows: Vec<VersionRow>,
}

/// The reason why a stored agent could not be restarted.
#[derive(Clone)]
struct NotStarted {
    identity: Identity,
    reason: String,
    /// The model that its `agent.toml` names but the host lacks, and the models that the host has.
    model_gone: Option<(String, Vec<String>)>,
}

impl NotStarted {
    fn because(error: &RuntimeError, row: &VersionRow) -> Self {
        let model_gone = match error {
            RuntimeError::ModelUnknown { name, known } => Some((name.clone(), known.clone())),
            _ => None,
        };
        NotStarted { identity: identity_of(row), reason: error.to_string(), model_gone }
    }

    fn error(self, agent: &str) -> RuntimeError {
        let agent = agent.to_owned();
        match self.model_gone {
            Some((model, known)) => RuntimeError::ModelGone { agent, model, known },
            None => {
                let message = format!("it could not be restarted, deploy it again: {}", self.reason);
                RuntimeError::Component { agent, message }
            }
        }
    }
}

/// All agents by name, and the compiler for new ones.
pub(crate) struct Deployments {
    store: Store,
    outbox: Arc<Outbox>,
    log: AgentLog,
    compiler: Compiler,
    instances: Instances,
    agents: RwLock<BTreeMap<String, Slot>>,
    /// Number of changes to the set of agents.
    changes: watch::Sender<u64>,
    /// Serializes the starts of agents that other hosts have just deployed.
    looking: tokio::sync::Mutex<()>,
    /// The version of the stored agents that are started here; 0 without a cluster.
    stored_version: AtomicI64,
}

impl Deployments {
    pub(crate) fn new(
        store: Store,
        outbox: Arc<Outbox>,
        log: AgentLog,
        compiler: Compiler,
        instances: Instances,
    ) -> Self {
        Deployments {
            store,
            outbox,
            log,
            compiler,
            instances,
            agents: RwLock::default(),
            changes: watch::Sender::default(),
            looking: tokio::sync::Mutex::default(),
            stored_version: AtomicI64::new(0),
        }
    }

    /// Compiles the stored agents concurrently.
    pub(crate) async fn restore(self: &Arc<Self>) -> Result<(), RuntimeError> {
        let rows = self.store.agents().await?;
        self.restore_all(rows).await;
        Ok(())
    }

    /// Tries those agents again that could not be restarted because the host lacked their model. Returns the names of
    /// those that can be called now.
    pub(crate) async fn restore_waiting(self: &Arc<Self>) -> Result<Vec<String>, RuntimeError> {
        let waits = |slot: &Slot| matches!(slot, Slot::Failed(NotStarted { model_gone: Some(_), .. }));
        let mut names: Vec<String> = self.names();
        names.retain(|name| self.read().get(name).is_some_and(waits));
        if names.is_empty() {
            return Ok(names);
        }
        let mut rows = self.store.agents().await?;
        rows.retain(|row| names.contains(&row.agent.name));
        self.restore_all(rows).await;
        names.retain(|name| self.deployed(name).is_ok());
        Ok(names)
    }

    /// Returns whether an agent could not be restarted for lack of a model that is served now.
    pub(crate) fn lacked_what_is_served(&self, models: &ModelSet) -> bool {
        self.read().values().any(|slot| match slot {
            Slot::Failed(NotStarted { model_gone: Some((name, _)), .. }) => {
                // An agent without a model of its own lacked a default.
                models.find(Some(name.as_str()).filter(|name| *name != "default")).is_ok()
            }
            Slot::Failed(_) | Slot::Ready(_) => false,
        })
    }

    /// Compares the stored agents with those in memory.
    pub(crate) async fn stored_changes(&self) -> Result<StoredChanges, RuntimeError> {
        let rows = self.store.agents().await?;
        let known: BTreeMap<String, Identity> =
            self.read().iter().map(|(name, slot)| (name.clone(), slot.identity())).collect();
        let mut changes = StoredChanges::default();
        let is_stored = |name: &&String| rows.iter().any(|row| row.agent.name == **name);
        changes.removed.extend(known.keys().filter(|name| !is_stored(name)).cloned());
        for row in rows {
            let name = &row.agent.name;
            let Some(before) = known.get(name) else {
                changes.rows.push(row);
                continue;
            };
            if *before == identity_of(&row) {
                continue;
            }
            let versions = self.store.versions(name).await?;
            if !versions.iter().any(|version| identity_of(version) == *before) {
                changes.removed.push(name.clone());
            }
            changes.rows.push(row);
        }
        Ok(changes)
    }

    /// Starts the versions that another host has made active. Returns the names of those that can be called.
    pub(crate) async fn start_stored(self: &Arc<Self>, rows: Vec<VersionRow>) -> Vec<String> {
        let mut names: Vec<String> = rows.iter().map(|row| row.agent.name.clone()).collect();
        self.restore_all(rows).await;
        names.retain(|name| self.deployed(name).is_ok());
        names
    }

    /// Returns the version of the stored agents that were started here last.
    pub(crate) fn stored_version(&self) -> i64 {
        self.stored_version.load(Ordering::Acquire)
    }

    /// Notes that the stored agents are started here as of this version.
    pub(crate) fn note_stored_version(&self, version: i64) {
        self.stored_version.fetch_max(version, Ordering::AcqRel);
    }

    /// Gives all agents the limits that follow from the operator's ceilings now. Turns that run keep theirs.
    pub(crate) fn renew_limits(&self) {
        let mut agents = self.agents.write().unwrap_or_else(PoisonError::into_inner);
        for slot in agents.values_mut() {
            let Slot::Ready(deployed) = slot else { continue };
            let limits = self.compiler.limits_of(&deployed.manifest);
            if limits != deployed.limits {
                *deployed = Arc::new(deployed.limited(limits));
            }
        }
    }

    async fn restore_all(self: &Arc<Self>, rows: Vec<VersionRow>) {
        let mut restoring = JoinSet::new();
        for row in rows {
            let deployments = self.clone();
            restoring.spawn(async move {
                let slot = deployments.restored(&row).await;
                deployments.put(row.agent.name, slot);
            });
        }
        restoring.join_all().await;
    }

    async fn restored(&self, row: &VersionRow) -> Slot {
        // Routes are set even for an agent that cannot be called, so that its events wait for it.
        if let Ok(manifest) = Manifest::from_toml(&row.agent.manifest) {
            self.outbox.router.set_agent(&row.agent.name, &manifest.trigger.event);
        }
        match self.restore_one(row).await {
            Ok(deployed) => Slot::Ready(Arc::new(deployed)),
            Err(error) => {
                tracing::error!(agent = row.agent.name, "cannot restart the agent: {error}");
                Slot::Failed(NotStarted::because(&error, row))
            }
        }
    }

    /// Returns the active version of an agent, which another host of the cluster may just have deployed.
    pub(crate) async fn find(&self, name: &str) -> Result<Arc<Agent>, RuntimeError> {
        self.look_for(name).await?;
        self.agent(name)
    }

    /// Fails unless the agent exists, ready or not, on this host or on another one that has just deployed it.
    pub(crate) async fn find_known(&self, name: &str) -> Result<(), RuntimeError> {
        self.look_for(name).await?;
        self.known(name)
    }

    /// Starts an agent that is stored but not known here, because another host of the cluster has just deployed it. Without a
    /// cluster, and for an agent that is known, it does nothing.
    async fn look_for(&self, name: &str) -> Result<(), RuntimeError> {
        if !self.store.is_clustered() || self.is_known(name) {
            return Ok(());
        }
        let _one = self.looking.lock().await;
        if self.is_known(name) {
            return Ok(());
        }
        let rows = self.store.agents().await?;
        let Some(row) = rows.into_iter().find(|row| row.agent.name == name) else { return Ok(()) };
        let slot = self.restored(&row).await;
        // A version that was deployed here meanwhile is newer.
        let mut agents = self.agents.write().unwrap_or_else(PoisonError::into_inner);
        agents.entry(row.agent.name).or_insert(slot);
        drop(agents);
        self.changes.send_modify(|changes| *changes += 1);
        self.outbox.ring();
        Ok(())
    }

    /// Lets [`Deployments::find`] find nothing while an agent is removed here and not yet in the database.
    pub(crate) async fn look_later(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.looking.lock().await
    }

    fn is_known(&self, name: &str) -> bool {
        self.read().contains_key(name)
    }

    async fn restore_one(&self, row: &VersionRow) -> Result<Deployed, RuntimeError> {
        let manifest = Manifest::from_toml(&row.agent.manifest)?;
        let source = Source::Stored { digest: row.agent.digest.clone() };
        let prepared = self.prepare(manifest, source).await?;
        let (deployed, logs) = prepared.into_version(row.version, row.agent.deployed_at_ms);
        self.log.keep(&row.agent.name, "", 0, &logs).await;
        Ok(deployed)
    }

    pub(crate) async fn prepare(&self, manifest: Manifest, source: Source) -> Result<Prepared, RuntimeError> {
        let loaded = self.compiler.compile(&manifest, source).await?;
        let _instance = self.instances.slot(0, OPERATOR).await;
        self.compiler.describe(manifest, loaded).await
    }

    /// Checks whether an agent with this manifest can coexist with the others.
    pub(crate) fn check_coexistence(
        &self,
        manifest: &Manifest,
        max_agents: usize,
    ) -> Result<(), RuntimeError> {
        let agents = self.read();
        let name = manifest.name.as_str();
        self.outbox.router.check_room(Some(name), manifest.trigger.event.len())?;
        if !agents.contains_key(name) && agents.len() >= max_agents {
            let message = format!(
                "{max_agents} agents are already deployed, which is the host's maximum; delete one first, or raise `max_agents` \
                 under [runtime] in skep.toml"
            );
            return Err(RuntimeError::HostFull { message });
        }
        for other in
            agents.values().filter_map(Slot::ready).filter(|other| other.manifest.name.as_str() != name)
        {
            for trigger in &manifest.trigger.http {
                if let Some(taken) = other.manifest.trigger.http.iter().find(|taken| taken.conflicts(trigger))
                {
                    return Err(RuntimeError::Route {
                        agent: name.to_owned(),
                        route: trigger.route.to_string(),
                        message: format!(
                            "matches {} requests that agent {} already handles with {}; change one of the routes",
                            trigger.method, other.manifest.name, taken.route
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    fn put(&self, name: String, slot: Slot) {
        self.agents.write().unwrap_or_else(PoisonError::into_inner).insert(name, slot);
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Makes a prepared version the active one.
    pub(crate) async fn activate(
        &self,
        mut prepared: Prepared,
        version: u64,
        deployed_at_ms: u64,
    ) -> AgentSummary {
        // The ceilings may have changed since the version was prepared.
        prepared.limits = self.compiler.limits_of(&prepared.manifest);
        let (agent, logs) = prepared.into_version(version, deployed_at_ms);
        let (name, summary) = (agent.manifest.name.to_string(), agent.summary());
        self.outbox.router.set_agent(&name, &agent.manifest.trigger.event);
        self.put(name.clone(), Slot::Ready(Arc::new(agent)));
        // The agent's schedules may be due earlier, and deliveries that waited for it can be made.
        self.outbox.ring();
        self.log.keep(&name, "", 0, &logs).await;
        let AgentSummary { version, digest, model, .. } = &summary;
        tracing::info!(agent = name, version, digest, model, "deployed");
        summary
    }

    /// Removes an agent and returns whether it existed.
    pub(crate) fn remove(&self, name: &str) -> bool {
        let was_there = self.agents.write().unwrap_or_else(PoisonError::into_inner).remove(name).is_some();
        self.changes.send_modify(|changes| *changes += u64::from(was_there));
        was_there
    }

    /// Returns the names of all agents, ready or not.
    pub(crate) fn names(&self) -> Vec<String> {
        self.read().keys().cloned().collect()
    }

    /// Returns how long sessions are kept, for each agent whose sessions expire.
    pub(crate) fn session_ttls(&self, ceiling: Option<Duration>) -> Vec<(String, Duration)> {
        let agents = self.read();
        let ttls = agents.iter().filter_map(|(name, slot)| {
            let asked = slot.ready().map(|agent| agent.manifest.sessions).unwrap_or_default();
            Some((name.clone(), asked.ttl_within(ceiling)?))
        });
        ttls.collect()
    }

    pub(crate) fn ready(&self) -> Vec<Arc<Agent>> {
        self.read().values().filter_map(Slot::ready).map(|deployed| deployed.agent.clone()).collect()
    }

    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(crate) fn failed(&self) -> Vec<FailedAgent> {
        let agents = self.read();
        let failed = agents.iter().filter_map(|(name, slot)| match slot {
            Slot::Failed(failed) => Some(FailedAgent { name: name.clone(), reason: failed.reason.clone() }),
            Slot::Ready(_) => None,
        });
        failed.collect()
    }

    /// Returns the active version of an agent.
    pub(crate) fn agent(&self, name: &str) -> Result<Arc<Agent>, RuntimeError> {
        self.deployed(name).map(|deployed| deployed.agent.clone())
    }

    /// Returns the active version of an agent, with its code.
    pub(crate) fn deployed(&self, name: &str) -> Result<Arc<Deployed>, RuntimeError> {
        // The lock is free again when the error lists the agents: a deployment that waits for it lets no second reader in.
        let slot = self.read().get(name).cloned();
        match slot {
            Some(Slot::Ready(agent)) => Ok(agent),
            Some(Slot::Failed(failed)) => Err(failed.error(name)),
            None => Err(self.not_found(name)),
        }
    }

    /// Returns the version of an agent with which a turn started, or the active version if that one
    /// is no longer kept.
    pub(crate) async fn with_digest(&self, name: &str, digest: &str) -> Result<Arc<Deployed>, RuntimeError> {
        let active = self.deployed(name)?;
        if active.digest == digest {
            return Ok(active);
        }
        let kept = self.store.versions(name).await?.into_iter().find(|row| row.agent.digest == digest);
        match kept {
            Some(row) => Ok(Arc::new(self.restore_one(&row).await?)),
            None => Ok(active),
        }
    }

    /// Fails unless the agent exists, ready or not.
    pub(crate) fn known(&self, name: &str) -> Result<(), RuntimeError> {
        if self.is_known(name) { Ok(()) } else { Err(self.not_found(name)) }
    }

    pub(crate) fn not_found(&self, name: &str) -> RuntimeError {
        let name = excerpt(name);
        RuntimeError::AgentNotFound { name, known: self.read().keys().take(20).cloned().collect() }
    }

    pub(crate) fn match_route(&self, method: &str, path: &str) -> Option<RouteMatch> {
        let agents = self.read();
        agents.values().filter_map(Slot::ready).find_map(|agent| {
            let mut triggers = agent.manifest.trigger.http.iter().filter(|trigger| trigger.method == method);
            let parameters = triggers.find_map(|trigger| trigger.route.parameters(path))?;
            let session =
                parameters.iter().find(|(name, _)| name == "session").map(|(_, value)| value.clone());
            let session = session.unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string());
            Some(RouteMatch { agent: agent.manifest.name.to_string(), session, parameters })
        })
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Slot>> {
        self.agents.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Directory for Deployments {
    fn agent(&self, name: &str) -> Result<Arc<Agent>, RuntimeError> {
        Deployments::agent(self, name)
    }

    fn ready(&self) -> Vec<Arc<Agent>> {
        Deployments::ready(self)
    }
}

fn identity_of(row: &VersionRow) -> Identity {
    (row.version, row.agent.deployed_at_ms)
}

impl Slot {
    fn identity(&self) -> Identity {
        match self {
            Slot::Ready(agent) => (agent.version, agent.deployed_at_ms),
            Slot::Failed(failed) => failed.identity,
        }
    }

    fn ready(&self) -> Option<&Arc<Deployed>> {
        match self {
            Slot::Ready(agent) => Some(agent),
            Slot::Failed(_) => None,
        }
    }
}
