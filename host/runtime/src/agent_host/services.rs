//! Services that all sessions share: the store, the models, the agents, and capacity for turns and
//! instances.

use crate::{
    Clock, RuntimeError, RuntimeOptions,
    admission::Admission,
    agent_log::AgentLog,
    approvals::ApprovalDesk,
    component::Compiler,
    compute::Compute,
    deployment::Deployments,
    egress::Egress,
    event::Outbox,
    guest::{Instances, WasmEngine},
    host_tools::HostTools,
    models::GrantedModels,
    session::LiveTurns,
    shutdown::Shutdown,
    tenancy::Tenancy,
    token_budget::TokenBudgets,
    webhook::Webhooks,
};
use skep_engine::ModelSet;
use skep_store::Store;
use std::sync::{Arc, OnceLock, Weak};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of resumed turns that load their message and session into memory at once.
const MAX_RESUMING: usize = 32;

pub(crate) struct Services {
    pub(crate) store: Store,
    pub(crate) models: GrantedModels,
    pub(crate) tokens: TokenBudgets,
    pub(crate) egress: Arc<Egress>,
    pub(crate) deployments: Arc<Deployments>,
    pub(crate) host_tools: HostTools,
    /// The host that owns these services, for turns that call other agents.
    host: OnceLock<Weak<super::Inner>>,
    pub(crate) instances: Instances,
    /// Permits for turns that are being resumed.
    resuming: Arc<Semaphore>,
    pub(crate) shutdown: Shutdown,
    pub(crate) approvals: ApprovalDesk,
    pub(crate) live: Arc<LiveTurns>,
    pub(crate) admission: Arc<Admission>,
    pub(crate) compute: Compute,
    pub(crate) tenancy: Tenancy,
    pub(crate) clock: Clock,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) webhooks: Webhooks,
    pub(crate) log: AgentLog,
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
        let (clock, shutdown) = (options.clock.clone(), Shutdown::default());
        let outbox = Arc::new(Outbox::new(store.clone(), tenancy.clone()));
        let log = AgentLog::new(store.clone(), shutdown.clone());
        let instances = Instances::new(wasm, options.max_instances, tenancy.clone());
        let deployments =
            Deployments::new(store.clone(), outbox.clone(), log.clone(), compiler, instances.clone());
        let webhooks = Webhooks::new(store.clone(), clock.clone(), egress.clone());
        webhooks.load(&outbox.router, &options.webhooks).await?;
        egress.vault.report_unreadable().await?;
        Ok(Services {
            models: GrantedModels::new(models, options),
            admission: Arc::new(Admission::new(options.waiting_bytes, tokens.clone(), tenancy.clone())),
            tokens,
            egress,
            deployments: Arc::new(deployments),
            instances,
            host_tools: HostTools::new(options),
            host: OnceLock::new(),
            resuming: Arc::new(Semaphore::new(MAX_RESUMING)),
            log,
            shutdown,
            approvals: ApprovalDesk::new(store.clone(), clock.clone()),
            live: Arc::default(),
            compute: Compute::new(tenancy.clone()),
            tenancy,
            clock,
            outbox,
            webhooks,
            store,
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

    /// Waits until one more resumed turn may have its message in memory.
    pub(crate) async fn place_to_resume(&self) -> OwnedSemaphorePermit {
        self.resuming.clone().acquire_owned().await.expect("the semaphore is never closed")
    }
}
