//! Services that all sessions share: the store, the models, the agents, and capacity for turns and
//! instances.

use super::held::HeldSessions;
use crate::{
    Clock, FailedAgent, Manifest, RouteMatch, RuntimeError, RuntimeOptions,
    agent::Agent,
    approvals::Wakers,
    component::{Compiler, Deployed, Prepared, Source},
    compute::Compute,
    egress::Egress,
    event::Outbox,
    guest::{InstancePlace, InstancePlaces, WasmEngine},
    host_tools::HostTools,
    intake::Intake,
    log_follower::LogGrowth,
    models::GrantedModels,
    session::LiveTurns,
    tenancy::{Shares, Tenancy},
    token_budget::TokenBudgets,
    webhook::Webhooks,
};
use skep_engine::ModelSet;
use skep_store::{LogEntry, Store, VersionRow};
use std::{
    collections::{BTreeMap, HashMap},
    sync::{Arc, OnceLock, PoisonError, RwLock, RwLockReadGuard, Weak},
    time::Duration,
};
use tokio::{
    sync::{Notify, OwnedSemaphorePermit, Semaphore, watch},
    task::JoinSet,
};

/// Principal of deployments and measurements, which belong to no tenant.
pub(crate) const OPERATOR: &str = "";
/// Retry delay reported to a caller whose agent is busy.
const RETRY_AFTER_MS: u32 = 1_000;
/// Maximum number of resumed turns that load their message and session into memory at once.
const MAX_RESUMING: usize = 32;

pub(crate) struct Services {
    pub(crate) store: Store,
    pub(crate) models: GrantedModels,
    pub(crate) tokens: TokenBudgets,
    pub(crate) egress: Arc<Egress>,
    wasm: WasmEngine,
    compiler: Compiler,
    pub(crate) host_tools: HostTools,
    /// The host that owns these services, for turns that call other agents.
    host: OnceLock<Weak<super::Inner>>,
    instances: InstancePlaces,
    /// Permits for turns that are being resumed.
    resuming: Arc<Semaphore>,
    agents: RwLock<BTreeMap<String, Slot>>,
    /// Number of changes to the set of agents.
    changes: watch::Sender<u64>,
    closed: watch::Sender<bool>,
    pub(crate) wakers: Wakers,
    pub(crate) live: Arc<LiveTurns>,
    pub(crate) intake: Arc<Intake>,
    pub(crate) compute: Compute,
    pub(crate) held: HeldSessions,
    /// Turns that were accepted and have not ended.
    active: Arc<watch::Sender<ActiveTurns>>,
    pub(crate) tenancy: Tenancy,
    pub(crate) clock: Clock,
    pub(crate) outbox: Outbox,
    pub(crate) webhooks: Webhooks,
    /// Rung when something may be due earlier than expected.
    pub(crate) courier_bell: Notify,
    pub(crate) log_growth: LogGrowth,
}

#[derive(Default)]
struct ActiveTurns {
    total: usize,
    of_agent: HashMap<String, Shares>,
}

/// An agent, addressed by its name.
#[derive(Clone)]
pub(super) enum Slot {
    Ready(Arc<Deployed>),
    /// The agent is stored but cannot be called.
    Failed(NotStarted),
}

/// The reason why a stored agent could not be restarted.
#[derive(Clone)]
pub(super) struct NotStarted {
    reason: String,
    /// The model that its `agent.toml` names but the host lacks, and the models that the host has.
    model_gone: Option<(String, Vec<String>)>,
}

impl NotStarted {
    fn because(error: &RuntimeError) -> Self {
        let model_gone = match error {
            RuntimeError::ModelUnknown { name, known } => Some((name.clone(), known.clone())),
            _ => None,
        };
        NotStarted { reason: error.to_string(), model_gone }
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

/// An accepted turn. Dropped when the turn has ended.
pub(crate) struct Active {
    turns: Arc<watch::Sender<ActiveTurns>>,
    agent: String,
    tenant: String,
}

impl Services {
    pub(super) async fn start(
        store: Store,
        models: ModelSet,
        options: &RuntimeOptions,
        tenancy: Tenancy,
    ) -> Result<Self, RuntimeError> {
        let wasm = WasmEngine::new(options)?;
        let egress = Arc::new(Egress::new(store.clone(), options, tenancy.clone()));
        let tokens = TokenBudgets::open(&store, options).await?;
        let compiler = Compiler::open(wasm.clone(), models.clone(), store.clone(), options).await?;
        let (clock, outbox, courier_bell) =
            (options.clock.clone(), Outbox::new(store.clone(), tenancy.clone()), Notify::new());
        let webhooks = Webhooks::new(store.clone(), clock.clone(), egress.clone());
        webhooks.load(&outbox.router, &options.webhooks).await?;
        egress.vault.report_unreadable().await?;
        Ok(Services {
            store,
            models: GrantedModels::new(models, options),
            tokens,
            egress,
            wasm,
            compiler,
            host_tools: HostTools::new(options),
            host: OnceLock::new(),
            instances: InstancePlaces::new(options.max_instances, tenancy.clone()),
            resuming: Arc::new(Semaphore::new(MAX_RESUMING)),
            agents: RwLock::default(),
            changes: watch::Sender::default(),
            closed: watch::Sender::new(false),
            wakers: Wakers::default(),
            live: Arc::default(),
            intake: Intake::new(options.waiting_bytes, tenancy.clone()),
            compute: Compute::new(tenancy.clone()),
            held: HeldSessions::default(),
            active: Arc::default(),
            tenancy,
            clock,
            outbox,
            webhooks,
            courier_bell,
            log_growth: LogGrowth::new(),
        })
    }

    /// Compiles the stored agents concurrently.
    pub(super) async fn restore(self: &Arc<Self>) -> Result<(), RuntimeError> {
        let mut restoring = JoinSet::new();
        for row in self.store.agents().await? {
            let services = self.clone();
            restoring.spawn(async move {
                // Routes are set even for an agent that cannot be called, so that its events wait
                // for it.
                if let Ok(manifest) = Manifest::from_toml(&row.agent.manifest) {
                    services.outbox.router.set_agent(&row.agent.name, &manifest.trigger.event);
                }
                let slot = match services.restore_one(&row).await {
                    Ok(deployed) => Slot::Ready(Arc::new(deployed)),
                    Err(error) => {
                        tracing::error!(agent = row.agent.name, "cannot restart the agent: {error}");
                        Slot::Failed(NotStarted::because(&error))
                    }
                };
                services.put(row.agent.name, slot);
            });
        }
        restoring.join_all().await;
        Ok(())
    }

    async fn restore_one(&self, row: &VersionRow) -> Result<Deployed, RuntimeError> {
        let manifest = Manifest::from_toml(&row.agent.manifest)?;
        let source = Source::Stored { digest: row.agent.digest.clone() };
        let prepared = self.prepare(manifest, source).await?;
        let (deployed, logs) = prepared.into_version(row.version, row.agent.deployed_at_ms);
        self.keep_logs(&row.agent.name, "", 0, &logs).await;
        Ok(deployed)
    }

    pub(super) async fn prepare(&self, manifest: Manifest, source: Source) -> Result<Prepared, RuntimeError> {
        let loaded = self.compiler.compile(&manifest, source).await?;
        let _instance = self.instance(0, OPERATOR).await;
        self.compiler.describe(manifest, loaded).await
    }

    /// Checks whether an agent with this manifest can coexist with the others.
    pub(super) fn check_place(&self, manifest: &Manifest, max_agents: usize) -> Result<(), RuntimeError> {
        let agents = self.read();
        let name = manifest.name.as_str();
        self.outbox.router.check_room(Some(name), manifest.trigger.event.len())?;
        if !agents.contains_key(name) && agents.len() >= max_agents {
            let message = format!(
                "{max_agents} agents are already deployed, which is the host's maximum; delete one first"
            );
            return Err(RuntimeError::LimitExceeded { limit: "max_agents", message });
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

    pub(super) fn put(&self, name: String, slot: Slot) {
        self.agents.write().unwrap_or_else(PoisonError::into_inner).insert(name, slot);
        self.changes.send_modify(|changes| *changes += 1);
    }

    /// Removes an agent and returns whether it existed.
    pub(super) fn remove(&self, name: &str) -> bool {
        let was_there = self.agents.write().unwrap_or_else(PoisonError::into_inner).remove(name).is_some();
        self.changes.send_modify(|changes| *changes += u64::from(was_there));
        was_there
    }

    /// Returns the names of all agents, ready or not.
    pub(super) fn names(&self) -> Vec<String> {
        self.read().keys().cloned().collect()
    }

    /// Returns how long sessions are kept, for each agent whose sessions expire.
    pub(super) fn session_ttls(&self, ceiling: Option<Duration>) -> Vec<(String, Duration)> {
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

    pub(super) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    pub(super) fn failed(&self) -> Vec<FailedAgent> {
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
        match self.read().get(name).cloned() {
            Some(Slot::Ready(agent)) => Ok(agent),
            Some(Slot::Failed(failed)) => Err(failed.error(name)),
            None => Err(self.not_found(name)),
        }
    }

    /// Returns the version of an agent with which a turn started, or the active version if that one
    /// is no longer kept.
    pub(crate) async fn agent_with(&self, name: &str, digest: &str) -> Result<Arc<Deployed>, RuntimeError> {
        let in_force = self.deployed(name)?;
        if in_force.digest == digest {
            return Ok(in_force);
        }
        let kept = self.store.versions(name).await?.into_iter().find(|row| row.agent.digest == digest);
        match kept {
            Some(row) => Ok(Arc::new(self.restore_one(&row).await?)),
            None => Ok(in_force),
        }
    }

    /// Fails unless the agent exists, ready or not.
    pub(super) fn known(&self, name: &str) -> Result<(), RuntimeError> {
        if self.read().contains_key(name) { Ok(()) } else { Err(self.not_found(name)) }
    }

    pub(super) fn not_found(&self, name: &str) -> RuntimeError {
        let name = name.chars().take(80).collect();
        RuntimeError::AgentNotFound { name, known: self.read().keys().take(20).cloned().collect() }
    }

    pub(super) fn match_route(&self, method: &str, path: &str) -> Option<RouteMatch> {
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

    pub(super) fn belongs_to(&self, host: &Arc<super::Inner>) {
        let first = self.host.set(Arc::downgrade(host));
        debug_assert!(first.is_ok(), "services belong to one host");
    }

    /// Returns the host, unless it has been dropped.
    pub(crate) fn host(&self) -> Option<super::AgentHost> {
        let inner = self.host.get()?.upgrade()?;
        Some(super::AgentHost { inner })
    }

    pub(crate) fn wasm(&self) -> &WasmEngine {
        &self.wasm
    }

    /// Waits until one more resumed turn may have its message in memory.
    pub(crate) async fn place_to_resume(&self) -> OwnedSemaphorePermit {
        self.resuming.clone().acquire_owned().await.expect("the semaphore is never closed")
    }

    /// Waits for a permit to run an instance. `depth` is the length of the chain of turns that wait
    /// for this one.
    pub(crate) async fn instance(&self, depth: usize, tenant: &str) -> InstancePlace {
        self.instances.take(depth, tenant).await
    }

    /// Stores log lines of a turn that is not committed. A write error is only logged, so that it
    /// does not hide why the turn failed.
    pub(crate) async fn keep_logs(&self, agent: &str, session: &str, turn: u64, lines: &[LogEntry]) {
        if lines.is_empty() {
            return;
        }
        match self.store.append_logs(agent, session, turn, lines).await {
            Ok(()) => self.log_growth.grew(),
            Err(error) => tracing::error!(agent, session, turn, "log lines were lost: {error}"),
        }
    }

    pub(crate) fn admit(&self) -> Result<(), RuntimeError> {
        if *self.closed.borrow() { Err(RuntimeError::ShuttingDown) } else { Ok(()) }
    }

    pub(super) fn close(&self) {
        self.closed.send_replace(true);
        // Wakes the log followers, which have nothing more to wait for.
        self.log_growth.grew();
    }

    /// Resolves when the host stops accepting turns.
    pub(crate) async fn closing(&self) {
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = self.closed.subscribe().wait_for(|closed| *closed).await;
    }

    /// Admits a turn, unless the agent has reached its limit of concurrent turns or the tenant its
    /// share of them, or the agent or the tenant has used up its tokens.
    pub(super) fn active(&self, agent: &Agent, tenant: &str) -> Result<Active, RuntimeError> {
        let (name, limit) = (agent.manifest.name.as_str(), agent.limits.concurrent_turns);
        self.tokens.share(tenant, Some((name, agent.limits.tokens_per_day))).check()?;
        let (mut taken, mut of_all) = (false, 0);
        self.active.send_modify(|turns| {
            let of_agent = turns.of_agent.entry(name.to_owned()).or_default();
            taken = of_agent.may_take(tenant, 1, limit as usize, self.tenancy.has_several());
            of_all = of_agent.all();
            if taken {
                of_agent.take(tenant, 1);
                turns.total += 1;
            }
        });
        if taken {
            return Ok(Active {
                turns: self.active.clone(),
                agent: name.to_owned(),
                tenant: tenant.to_owned(),
            });
        }
        let has_place = of_all < limit as usize;
        let whose = if has_place { " (this tenant's share)" } else { "" };
        let limit = u32::try_from(of_all).unwrap_or(limit);
        Err(RuntimeError::TooManyTurns {
            agent: name.to_owned(),
            whose,
            limit,
            retry_after_ms: RETRY_AFTER_MS,
        })
    }

    /// Counts a turn that was accepted earlier, regardless of the current limit.
    pub(super) fn active_again(&self, agent: &str, tenant: &str) -> Active {
        self.active.send_modify(|turns| {
            turns.of_agent.entry(agent.to_owned()).or_default().take(tenant, 1);
            turns.total += 1;
        });
        Active { turns: self.active.clone(), agent: agent.to_owned(), tenant: tenant.to_owned() }
    }

    /// Resolves when no accepted turn is left.
    pub(super) async fn quiet(&self) {
        let mut active = self.active.subscribe();
        // The sender is part of `self`, so it is not dropped meanwhile.
        let _ = active.wait_for(|turns| turns.total == 0).await;
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<String, Slot>> {
        self.agents.read().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    fn ready(&self) -> Option<&Arc<Deployed>> {
        match self {
            Slot::Ready(agent) => Some(agent),
            Slot::Failed(_) => None,
        }
    }
}

impl Drop for Active {
    fn drop(&mut self) {
        self.turns.send_modify(|turns| {
            turns.total -= 1;
            if let Some(of_agent) = turns.of_agent.get_mut(&self.agent) {
                of_agent.give_back(&self.tenant, 1);
                if of_agent.all() == 0 {
                    turns.of_agent.remove(&self.agent);
                }
            }
        });
    }
}
