//! The host of all agents, used by the gateway and the command line.
//!
//! [`AgentHost`] is a handle: clones refer to the same host, and dropping the last one ends every
//! session. The host admits work and dispatches it; the work itself is done by `component`
//! (deployment) and `session` (turns).

mod adoption;
mod batches;
mod deployments;
mod events;
mod expiry;
mod held;
mod model_use;
mod schedules;
mod secrets;
mod services;
mod sessions;
mod standing;
mod store_health;
mod turns;
mod webhooks;

pub use model_use::ModelMismatch;
pub(crate) use services::{Active, OPERATOR, Services};

use crate::{
    AgentDetail, AgentSummary, Compute, FailedAgent, KeyRing, LogFilter, LogFollower, LogLine, RouteMatch,
    RuntimeError, RuntimeOptions, ToolDefinition, batch::BatchQueue, clock::now_ms, courier::Courier,
    session::Sessions,
};
use expiry::Expiry;
use skep_engine::ModelSet;
use skep_outbound::ToolServer;
use skep_store::{LogRow, Store};
use std::{
    collections::BTreeMap,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};
use store_health::StoreHealth;
use tokio::{sync::watch, task::JoinSet};

const MAX_PAGE: u32 = 1_000;

/// The agents of one process.
#[derive(Clone)]
pub struct AgentHost {
    inner: Arc<Inner>,
}

struct Inner {
    services: Arc<Services>,
    sessions: Arc<Sessions>,
    batches: BatchQueue,
    keys: KeyRing,
    max_agents: usize,
    /// Serializes deployments, so that only one at a time becomes active.
    deploying: tokio::sync::Mutex<()>,
    expiry: Expiry,
    store_health: StoreHealth,
    /// Aborted with the host.
    _background: JoinSet<()>,
    /// Set once the host has started.
    courier: OnceLock<Courier>,
}

/// A handle that does not keep the host alive.
#[derive(Clone)]
pub(crate) struct WeakHost(Weak<Inner>);

impl AgentHost {
    /// Starts the WebAssembly engine, compiles the stored agents and resumes the turns that were
    /// open. An agent that no longer compiles is listed by [`AgentHost::failed_agents`] and does
    /// not keep the others from starting; its turns wait until it is deployed again.
    pub async fn start(
        store: Store,
        models: ModelSet,
        options: RuntimeOptions,
    ) -> Result<Self, RuntimeError> {
        if let Err(error) = store.tidy().await {
            // The leftovers are invisible, and the next start tries again.
            tracing::warn!("cannot remove deleted data from the database yet: {error}");
        }
        let keys = KeyRing::new(store.clone());
        keys.load().await;
        let store_health = StoreHealth::new(store.clone());
        let watching = store_health::watch(store.clone(), options.disk_warning_bytes);
        let services = Arc::new(Services::start(store, models, &options, keys.tenancy()).await?);
        services.restore().await?;
        services.hold_sessions().await?;
        let sessions = Arc::new(Sessions::new(&options));
        let deploying = tokio::sync::Mutex::default();
        let expiry = Expiry::new(&services, &sessions, &options);
        expiry.resume_clock().await?;
        let mut background = JoinSet::new();
        background.spawn(expiry.clone().run());
        background.spawn(watching);
        background.spawn(adoption::run(services.clone()));
        let inner = Inner {
            services,
            sessions,
            batches: BatchQueue::new(options.batch),
            keys,
            max_agents: options.max_agents,
            deploying,
            expiry,
            store_health,
            _background: background,
            courier: OnceLock::new(),
        };
        let host = AgentHost { inner: Arc::new(inner) };
        host.inner.services.belongs_to(&host.inner);
        host.resume_turns().await?;
        // The courier starts after the turns that it requested earlier have been resumed.
        let weak = WeakHost(Arc::downgrade(&host.inner));
        host.inner.courier.get_or_init(|| Courier::start(host.inner.services.clone(), weak));
        host.inner.batches.start(&host).await?;
        Ok(host)
    }

    /// Returns the agents that are ready, ordered by name.
    pub fn agents(&self) -> Vec<AgentSummary> {
        self.inner.services.ready().iter().map(|agent| agent.summary()).collect()
    }

    /// Returns the stored agents that could not be restarted.
    pub fn failed_agents(&self) -> Vec<FailedAgent> {
        self.inner.services.failed()
    }

    /// Returns a counter that changes whenever an agent is deployed, rolled back or removed. Its
    /// value has no other meaning.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.inner.services.changes()
    }

    pub fn agent(&self, name: &str) -> Result<AgentDetail, RuntimeError> {
        Ok(self.inner.services.agent(name)?.detail())
    }

    /// Returns a tool that others may call with [`crate::Origin::Tool`].
    pub fn tool(&self, agent: &str, tool: &str) -> Result<ToolDefinition, RuntimeError> {
        self.inner.services.agent(agent)?.callable(tool).map(|tool| tool.definition.clone())
    }

    /// Returns the servers whose tools agents may be granted, by name.
    pub fn tool_servers(&self) -> &BTreeMap<String, Arc<dyn ToolServer>> {
        self.inner.services.host_tools.servers()
    }

    /// Removes an agent with its sessions and logs. Running turns are cancelled.
    pub async fn delete(&self, name: &str) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        let _one = self.inner.deploying.lock().await;
        if !services.remove(name) {
            return Err(services.not_found(name));
        }
        self.inner.sessions.end_agent(name).await;
        services.store.delete_agent(name).await?;
        services.outbox.router.set_agent(name, &[]);
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
            self.inner.services.known(agent)?;
        }
        let rows = self.inner.services.store.logs(filter, after_id, limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(log_line).collect())
    }

    /// Follows the log lines with an id greater than `after_id` as they are written. The follower
    /// ends with the host.
    pub fn follow_logs(&self, filter: LogFilter, after_id: i64) -> LogFollower {
        LogFollower::new(self.inner.services.clone(), filter, after_id)
    }

    /// Returns the agent and the session that serve a request with this method and path (without
    /// the query).
    pub fn match_route(&self, method: &str, path: &str) -> Option<RouteMatch> {
        self.inner.services.match_route(method, path)
    }

    pub(crate) fn services(&self) -> &Arc<Services> {
        &self.inner.services
    }

    /// Returns the API keys of this host.
    pub fn keys(&self) -> &KeyRing {
        &self.inner.keys
    }

    /// Returns the compute slots for long CPU-bound work.
    pub fn compute(&self) -> &Compute {
        &self.inner.services.compute
    }

    pub fn models(&self) -> &ModelSet {
        self.inner.services.models.set()
    }

    /// Returns the number of sessions in memory.
    pub fn loaded_sessions(&self) -> usize {
        self.inner.sessions.count()
    }

    /// Returns the number of bytes that sessions keep in memory.
    #[cfg(test)]
    pub(crate) fn remembered_bytes(&self) -> usize {
        self.inner.sessions.remembered_bytes()
    }

    /// Stops accepting turns, waits until the accepted ones have ended or `deadline` has passed,
    /// and ends the rest.
    pub async fn drain(&self, deadline: Duration) {
        let services = &self.inner.services;
        services.close();
        if let Some(courier) = self.inner.courier.get() {
            courier.stop();
        }
        self.inner.batches.stop(self).await;
        if tokio::time::timeout(deadline, services.quiet()).await.is_err() {
            tracing::warn!("turns are still running at the drain deadline; cancelling them");
        }
        self.inner.sessions.end_all().await;
        if let Err(error) = services.store.end_in_order(now_ms()).await {
            tracing::warn!(
                "cannot record an orderly shutdown, so the interrupted turns will count as lost: {error}"
            );
        }
    }
}

impl WeakHost {
    pub(crate) fn upgrade(&self) -> Option<AgentHost> {
        Some(AgentHost { inner: self.0.upgrade()? })
    }
}

pub(crate) fn log_line(row: LogRow) -> LogLine {
    LogLine {
        id: row.id,
        agent: row.agent,
        session: row.session,
        turn: row.turn,
        at_ms: row.entry.at_ms,
        level: row.entry.level,
        message: row.entry.message,
    }
}
