//! The host of all agents, used by the gateway and the command line.
//!
//! [`AgentHost`] is a handle: clones refer to the same host, and dropping the last one ends every
//! session. The host admits work and dispatches it; the work itself is done by `component`
//! (deployment) and `session` (turns).

mod approvals;
mod batches;
mod cluster;
mod deployments;
mod events;
mod expiry;
mod files;
mod held;
mod kv_pages;
mod listings;
mod mcp_sessions;
mod membership;
mod model_use;
mod monitoring;
mod notices;
mod parts;
mod responses;
mod schedules;
mod secrets;
mod session_search;
mod sessions;
mod settings;
mod store_health;
mod tenants;
mod turns;
mod usage;
mod webhooks;

pub use listings::StatePage;

pub use files::{ClientFile, NewClientFile};
pub use model_use::ModelMismatch;
pub use monitoring::{HostLoad, LimitUse, TenantLoad};
pub use parts::HostParts;
pub use secrets::SecretReader;
pub use session_search::{FoundMessage, FoundSession, FoundSessions};
pub use tenants::{DeletedTenant, TenantUsage};

use crate::{
    AgentDetail, AgentSummary, BudgetUsedUp, Compute, FailedAgent, KeyRing, LogFilter, LogFollower, LogLine,
    RequestLog, RouteMatch, RuntimeError, RuntimeOptions, SessionChange, TenantBudget, ToolDefinition,
    admission::Admission,
    agent_log::{AgentLog, log_line},
    approvals::ApprovalDesk,
    batch::{self, BatchQueue, LiveAnswers},
    capability::{Reach, tools::HostTools},
    cluster::{Cluster, Part},
    component::Compiler,
    courier::{self, Courier},
    deployment::Deployments,
    disk_pages::DiskPages,
    dispatch::{Dispatch, adoption},
    egress::Egress,
    event::Outbox,
    feed::LiveTurns,
    guest::{Instances, WasmEngine},
    limits::RecentUse,
    models::GrantedModels,
    options::Rules,
    requests::Askers,
    session::{ResumePermits, Sessions, TurnHost},
    session_changes::SessionChanges,
    shutdown::Shutdown,
    token_budget::TokenBudgets,
    use_queue::UseQueue,
    webhook::Webhooks,
};
use expiry::Expiry;
use responses::Following;
use skep_engine::{EraseScope, LiveSetting, ModelSet, ServedModel};
use skep_outbound::ToolServer;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak, atomic::AtomicBool},
    time::Duration,
};
use store_health::StoreHealth;
use tokio::{
    sync::{broadcast, watch},
    task::JoinSet,
};

const MAX_PAGE: u32 = 1_000;
/// Number of sessions of a cluster whose owner a host remembers to be, for each session that it may keep in memory.
const OWNED_FOR_EACH_LOADED: usize = 4;

/// The agents of one process.
#[derive(Clone)]
pub struct AgentHost {
    inner: Arc<Inner>,
}

struct Inner {
    dispatch: Arc<Dispatch>,
    webhooks: Arc<Webhooks>,
    batches: BatchQueue,
    keys: KeyRing,
    max_agents: usize,
    disk_warning_bytes: u64,
    rules: LiveSetting<Rules>,
    /// Serializes deployments, so that only one at a time becomes active.
    deploying: tokio::sync::Mutex<()>,
    /// Serializes decisions about work that is held since a restore.
    holding: tokio::sync::Mutex<()>,
    expiry: Expiry,
    store_health: StoreHealth,
    courier: Courier,
    /// The tasks that wait for the turns of responses.
    following: Arc<Following>,
    started_at_ms: u64,
    /// Aborted with the host.
    _background: JoinSet<()>,
    /// The tasks of a host of a cluster, aborted with the host.
    cluster_tasks: std::sync::Mutex<JoinSet<()>>,
}

impl AgentHost {
    /// Starts the WebAssembly engine, compiles the stored agents and resumes the turns that were
    /// open. An agent that no longer compiles is listed by [`AgentHost::failed_agents`] and does
    /// not keep the others from starting; its turns wait until it is deployed again.
    pub async fn start(parts: HostParts, options: RuntimeOptions) -> Result<Self, RuntimeError> {
        let HostParts { store, models, tool_servers, disk, clock, .. } = parts;
        let HostParts { role, default_model, gives_pages, peers, counts, .. } = parts;
        // Reports what others change from here on, so that nothing of what is read below is missed.
        let notices = store.notices();
        let max_owned = options.max_sessions_loaded.saturating_mul(OWNED_FOR_EACH_LOADED);
        let placement = options.placement;
        let part = Part { role, gives_pages, default_model, peers, counts, max_owned, placement };
        let cluster = Cluster::new(&store, part)?;
        cluster.refresh().await?;
        // Agents that are started below may use models of other hosts.
        if let Some(others) = cluster.other_models(&models) {
            models.set_others(others);
        }
        if let Err(error) = store.tidy().await {
            // The leftovers are invisible, and the next start tries again.
            tracing::warn!("cannot remove deleted data from the database yet: {error}");
        }
        let keys = KeyRing::new(store.clone(), clock.clone());
        keys.load().await;
        let store_health = StoreHealth::new(store.clone());
        let watching = store_health::watch(store.clone(), options.disk_warning_bytes);
        let tenancy = keys.tenancy();
        let rules = LiveSetting::new(Rules::from(&options));
        let (shutdown, live) = (Shutdown::default(), Arc::<LiveTurns>::default());
        let log = AgentLog::new(store.clone(), shutdown.clone());
        let outbox = Arc::new(Outbox::new(store.clone(), tenancy.clone()));
        let egress = Arc::new(Egress::new(store.clone(), clock.clone(), &options, tenancy.clone()));
        let webhooks = Arc::new(Webhooks::new(store.clone(), clock.clone(), egress.clone()));
        webhooks.load(&outbox.router, &options.webhooks).await?;
        egress.vault.report_unreadable().await?;
        let wasm = WasmEngine::new(&options)?;
        let compiler = Compiler::open(
            wasm.clone(),
            models.clone(),
            store.clone(),
            clock.clone(),
            &options,
            rules.clone(),
        );
        let compiler = compiler.await?;
        let instances = Instances::new(wasm, options.max_instances, tenancy.clone());
        let (stored, routed, logged) = (store.clone(), outbox.clone(), log.clone());
        let deployments = Arc::new(Deployments::new(stored, routed, logged, compiler, instances.clone()));
        let tokens = TokenBudgets::open(&store, clock.clone(), rules.clone()).await?;
        let compute = Arc::new(Compute::new(tenancy.clone()));
        let stored = (store.clone(), clock.clone(), shutdown.clone());
        let (logged, prices) = (options.requests.clone(), options.prices.clone());
        let (requests, logging) = RequestLog::new(logged, stored, prices, egress.vault.clone());
        let uses = UseQueue::new(store.clone(), shutdown.clone());
        let batches = batch::Context {
            store: store.clone(),
            clock: clock.clone(),
            shutdown: shutdown.clone(),
            outbox: outbox.clone(),
            tenancy: tenancy.clone(),
            models: models.clone(),
            granted: GrantedModels::new(models.clone(), rules.clone()),
            keys: keys.clone(),
            tokens: tokens.clone(),
            uses: uses.clone(),
            compute: compute.clone(),
            deployments: deployments.clone(),
            requests: requests.clone(),
            live: LiveAnswers::default(),
            responses: options.responses.clone(),
        };
        let batches = BatchQueue::new(options.batch.clone(), batches);
        let courier = courier::Context {
            store: store.clone(),
            clock: clock.clone(),
            shutdown: shutdown.clone(),
            outbox: outbox.clone(),
            webhooks: webhooks.clone(),
            egress: egress.clone(),
            warm_ahead: if disk.is_some() { options.warm_ahead } else { Duration::ZERO },
            cluster: cluster.clone(),
            has_lost_host: AtomicBool::new(false),
        };
        let sessions = Arc::new(Sessions::new(&options));
        // A turn may call other agents, so what it reaches refers to what runs turns.
        let dispatch = Arc::new_cyclic(|dispatch: &Weak<Dispatch>| {
            let (directory, invoke) = (deployments.clone(), dispatch.clone());
            let tools = HostTools::new(tool_servers, rules.clone(), directory, invoke, live.clone());
            let disk = DiskPages::new(disk, &models, tenancy.clone());
            let admission = Admission::new(options.waiting_bytes, tokens.clone(), tenancy);
            let reach = Reach {
                disk,
                models: GrantedModels::new(models, rules.clone()),
                tokens,
                egress,
                compute,
                approvals: ApprovalDesk::new(store.clone(), clock.clone()),
                tools: Arc::new(tools),
                requests,
            };
            let host = TurnHost {
                store,
                clock,
                shutdown,
                outbox,
                log,
                deployments,
                instances,
                live,
                recent_use: RecentUse::default(),
                reach,
                uses,
                resuming: ResumePermits::default(),
                changes: SessionChanges::default(),
                cluster,
            };
            Dispatch { host: Arc::new(host), admission, sessions: sessions.clone() }
        });
        let host = &dispatch.host;
        if host.cluster.role().runs_agents() {
            host.deployments.restore().await?;
        }
        dispatch.hold_sessions().await?;
        let expiry = Expiry::new(host, &sessions, &options);
        expiry.resume_clock().await?;
        let mut background = JoinSet::new();
        background.spawn(expiry.clone().run());
        background.spawn(watching);
        background.spawn(logging);
        background.spawn(adoption::run(Arc::downgrade(&dispatch), host.shutdown.clone()));
        dispatch.resume_turns().await?;
        // The courier starts after the turns that it requested earlier have been resumed.
        let courier = Courier::start(Arc::new(courier), Arc::downgrade(&dispatch));
        if dispatch.host.cluster.role().runs_agents() {
            batches.start(&dispatch).await?;
        }
        let following = Arc::<Following>::default();
        // The first host follows them for all.
        if dispatch.host.cluster.is_first() {
            background.spawn(responses::follow_open(Arc::downgrade(&dispatch), following.clone()));
        }
        let started_at_ms = dispatch.host.clock.now_ms();
        let inner = Inner {
            dispatch,
            webhooks,
            batches,
            keys,
            max_agents: options.max_agents,
            disk_warning_bytes: options.disk_warning_bytes,
            rules,
            deploying: tokio::sync::Mutex::default(),
            holding: tokio::sync::Mutex::default(),
            expiry,
            store_health,
            courier,
            following,
            started_at_ms,
            _background: background,
            cluster_tasks: std::sync::Mutex::default(),
        };
        let host = AgentHost { inner: Arc::new(inner) };
        if let Some(notices) = notices {
            host.join_cluster(notices);
        }
        Ok(host)
    }

    /// Returns the agents that are ready, ordered by name.
    pub fn agents(&self) -> Vec<AgentSummary> {
        self.host().deployments.ready().iter().map(|agent| agent.summary()).collect()
    }

    /// Returns the stored agents that could not be restarted.
    pub fn failed_agents(&self) -> Vec<FailedAgent> {
        self.host().deployments.failed()
    }

    /// Returns a counter that changes whenever an agent is deployed, rolled back or removed. Its
    /// value has no other meaning.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.host().deployments.changes()
    }

    /// Returns the committed turns of all sessions from now on.
    pub fn session_changes(&self) -> broadcast::Receiver<SessionChange> {
        self.host().changes.subscribe()
    }

    /// Returns the active version of an agent. Fails if there is none, or if the agent could not be restarted.
    pub fn agent(&self, name: &str) -> Result<AgentDetail, RuntimeError> {
        Ok(self.host().deployments.agent(name)?.detail())
    }

    /// Returns what [`AgentHost::agent`] does, also for an agent that another host of the cluster has just deployed.
    pub async fn find_agent(&self, name: &str) -> Result<AgentDetail, RuntimeError> {
        Ok(self.host().deployments.find(name).await?.detail())
    }

    /// Returns a tool that others may call with [`crate::Origin::Tool`].
    pub fn tool(&self, agent: &str, tool: &str) -> Result<ToolDefinition, RuntimeError> {
        self.host().deployments.agent(agent)?.callable(tool).map(|tool| tool.definition.clone())
    }

    /// Returns the servers whose tools agents may be granted, by name.
    pub fn tool_servers(&self) -> Arc<BTreeMap<String, Arc<dyn ToolServer>>> {
        self.host().reach.tools.servers.now()
    }

    /// Removes an agent with its sessions and logs. Running turns are cancelled.
    pub async fn delete(&self, name: &str) -> Result<(), RuntimeError> {
        let host = self.host();
        let _one = self.inner.deploying.lock().await;
        let _later = host.deployments.look_later().await;
        if !host.deployments.remove(name) {
            return Err(host.deployments.not_found(name));
        }
        self.inner.forget_agent(name).await;
        host.recent_use.forget(name);
        host.store.delete_agent(name).await?;
        host.outbox.router.set_agent(name, &[]);
        tracing::info!(agent = name, "deleted");
        Ok(())
    }

    /// Returns up to `limit` log lines. With `after_id`, these are the first lines with a greater
    /// id; without it, the newest lines. Lines are ordered oldest first.
    pub async fn logs(
        &self,
        filter: &LogFilter,
        after_id: Option<i64>,
        limit: u32,
    ) -> Result<Vec<LogLine>, RuntimeError> {
        if let Some(agent) = &filter.agent {
            self.host().deployments.known(agent)?;
        }
        let rows = self.host().store.logs(filter, after_id, limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(log_line).collect())
    }

    /// Follows the log lines with an id greater than `after_id` as they are written. The follower
    /// ends with the host.
    pub fn follow_logs(&self, filter: LogFilter, after_id: i64) -> LogFollower {
        self.host().log.follow(filter, after_id)
    }

    /// Returns the agent and the session that serve a request with this method and path (without
    /// the query).
    pub fn match_route(&self, method: &str, path: &str) -> Option<RouteMatch> {
        self.host().deployments.match_route(method, path)
    }

    pub(crate) fn host(&self) -> &Arc<TurnHost> {
        &self.inner.dispatch.host
    }

    /// Returns the budget for work of a tenant that starts without an agent, by the request of a key.
    /// Fails if the budget is used up.
    pub fn tenant_budget(&self, tenant: &str, key: Option<&str>) -> Result<TenantBudget, BudgetUsedUp> {
        let TurnHost { reach, uses, .. } = &**self.host();
        TenantBudget::open(&reach.tokens, uses, tenant, key)
    }

    /// Returns the API keys of this host.
    pub fn keys(&self) -> &KeyRing {
        &self.inner.keys
    }

    /// Returns the compute slots for long CPU-bound work.
    pub fn compute(&self) -> &Compute {
        &self.host().reach.compute
    }

    /// Returns the log of requests to models.
    pub fn requests(&self) -> &RequestLog {
        &self.host().reach.requests
    }

    /// Returns the models that agents and clients may name.
    pub fn models(&self) -> &ModelSet {
        self.host().reach.models.set()
    }

    /// Checks that a tenant may use a model without an agent. An operator may use all models. The error says which
    /// setting would allow it.
    pub fn may_use_model(&self, tenant: &str, is_operator: bool, model: &ServedModel) -> Result<(), String> {
        self.host().reach.models.check_direct(tenant, is_operator, model)
    }

    /// Returns the number of sessions in memory.
    pub fn loaded_sessions(&self) -> usize {
        self.inner.dispatch.sessions.count()
    }

    /// Returns the number of bytes of messages that wait or whose turns run.
    #[cfg(test)]
    pub(crate) fn waiting_bytes(&self) -> usize {
        self.inner.dispatch.admission.waiting_bytes()
    }

    /// Returns the number of bytes that sessions keep in memory.
    #[cfg(test)]
    pub(crate) fn remembered_bytes(&self) -> usize {
        self.inner.dispatch.sessions.remembered_bytes()
    }

    /// Stops accepting turns, waits until the accepted ones have ended or `deadline` has passed,
    /// and ends the rest.
    pub async fn drain(&self, deadline: Duration) {
        let host = self.host();
        host.shutdown.begin();
        // The others send nothing anymore.
        host.cluster.begin_draining();
        // The followers have nothing more to wait for.
        host.log.grew();
        self.inner.courier.stop();
        self.inner.batches.stop().await;
        if tokio::time::timeout(deadline, self.inner.dispatch.admission.quiet()).await.is_err() {
            tracing::warn!("turns are still running at the drain deadline; cancelling them");
        }
        self.inner.dispatch.sessions.end_all().await;
        host.uses.flush().await;
        host.reach.requests.flush().await;
        if let Err(error) = host.store.end_in_order(host.clock.now_ms()).await {
            tracing::warn!(
                "cannot record an orderly shutdown, so the interrupted turns will count as lost: {error}"
            );
        }
    }
}

impl Inner {
    /// Ends the sessions of an agent that is being removed, and forgets what this host holds of them.
    async fn forget_agent(&self, name: &str) {
        let TurnHost { reach, store, .. } = &*self.dispatch.host;
        self.dispatch.sessions.end_agent(name).await;
        store.forget_line_count(name);
        reach.requests.forget(Askers::Agent(name.to_owned())).await;
        reach.disk.erase(EraseScope::Agent(name.to_owned())).await;
    }
}
