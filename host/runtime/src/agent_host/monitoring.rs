//! The state of the host, for monitoring.

use super::AgentHost;
use crate::{Amount, BatchOptions, Money, RecentTurns, RuntimeError, Tenant, event::MAX_WAITING_DELIVERIES};
use skep_store::{DataPlace, DiskUse, KeptSizes, OpenWork, QueuedWork};
use std::time::Duration;
use tokio::time::timeout;

/// A database that takes longer to count the work is not waited for.
const DEADLINE: Duration = Duration::from_secs(5);

/// The work of the host, and how far its limits are used.
#[derive(Clone, Debug)]
pub struct HostLoad {
    pub work: QueuedWork,
    /// Number of messages that wait for their turn to start.
    pub waiting_messages: u64,
    pub dead_letters: u64,
    pub data: DataPlace,
    /// `None` if the database is not in a folder of this machine.
    pub disk: Option<DiskUse>,
    /// Whether the disk has less free space than the operator wants to be warned about.
    pub is_disk_low: bool,
    pub limits: Vec<LimitUse>,
}

/// How far one limit is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitUse {
    /// The setting under `[runtime]` in skep.toml, or a name that the guide to operations explains.
    pub name: &'static str,
    pub used: u64,
    pub limit: u64,
}

/// How far the limits of a tenant are used, except its rates, which the gateway counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TenantLoad {
    pub limits: Vec<LimitUse>,
    /// The amount that was spent today, and the budget, if the tenant has one in money.
    pub money: Option<(Amount, Money)>,
}

impl AgentHost {
    /// Returns the number of open turns, approvals and dead letters of all tenants.
    pub async fn open_work(&self) -> Result<OpenWork, RuntimeError> {
        Ok(self.host().store.open_work().await?)
    }

    /// Returns the disk usage of the database, or `None` if it is in memory.
    pub fn disk_use(&self) -> Option<DiskUse> {
        self.host().store.disk_use()
    }

    /// Returns how far the limits of a tenant are used.
    pub fn tenant_load(&self, tenant: &Tenant) -> TenantLoad {
        let tenant = tenant.as_str();
        let tokens = &self.host().reach.tokens;
        let (waiting, most) = self.inner.dispatch.admission.taken_bytes_of(tenant);
        let waiting =
            LimitUse { name: "max_waiting_bytes_per_tenant", used: waiting as u64, limit: most as u64 };
        let of_day = tokens.tokens_of_tenant(tenant);
        let of_day = of_day.map(|(used, limit)| LimitUse { name: "tokens_per_day", used, limit });
        TenantLoad {
            limits: of_day.into_iter().chain([waiting]).collect(),
            money: tokens.money_of_tenant(tenant),
        }
    }

    /// Returns how far the limits over all sessions of an agent are used, by the names under `[limits]` in agent.toml.
    pub fn agent_load(&self, agent: &str) -> [(&'static str, u64); 2] {
        [
            ("concurrent_turns", self.inner.dispatch.admission.open_turns_of(agent) as u64),
            ("tokens_per_day", self.host().reach.tokens.used_by_agent(agent)),
        ]
    }

    /// Returns what the latest turns of an agent used of the limits of a turn, or `None` if none has ended on this host since it
    /// started.
    pub fn recent_turns(&self, agent: &str) -> Option<RecentTurns> {
        self.host().recent_use.of(agent)
    }

    /// Returns the work of all tenants, and how far the limits of the host are used.
    pub async fn load(&self) -> Result<HostLoad, RuntimeError> {
        let host = self.host();
        let counted = async {
            let work = host.store.queued_work(host.clock.now_ms()).await?;
            let open = host.store.open_work().await?;
            Ok::<_, RuntimeError>((work, open, host.store.kept_sizes().await?))
        };
        let slow = |_elapsed| RuntimeError::StoreStalled { waited_s: DEADLINE.as_secs() };
        let (work, open, kept) = timeout(DEADLINE, counted).await.map_err(slow)??;
        let admission = &self.inner.dispatch.admission;
        let disk = self.disk_use();
        let free = disk.and_then(|disk| disk.free);
        let sessions = &self.inner.dispatch.sessions;
        let limits = [
            ("max_agents", (host.deployments.names().len(), self.inner.max_agents)),
            ("max_waiting_bytes", admission.taken_bytes()),
            ("max_instances", host.instances.taken()),
            ("max_sessions_loaded", sessions.loaded()),
            ("max_session_bytes", sessions.kept_bytes()),
            ("outbound_requests", host.reach.egress.running_requests()),
            ("deliveries", ((work.events + work.webhooks) as usize, MAX_WAITING_DELIVERIES)),
        ];
        let limits =
            limits.map(|(name, (used, limit))| LimitUse { name, used: used as u64, limit: limit as u64 });
        Ok(HostLoad {
            work,
            waiting_messages: (admission.open_turns() as u64).saturating_sub(work.running_turns),
            dead_letters: open.dead_letters,
            data: host.store.place(),
            disk,
            is_disk_low: free.is_some_and(|free| free < self.inner.disk_warning_bytes),
            limits: limits.into_iter().chain(self.kept_limits(kept)).collect(),
        })
    }

    /// Returns how far the limits on what is kept for clients are used.
    fn kept_limits(&self, kept: KeptSizes) -> impl Iterator<Item = LimitUse> {
        let KeptSizes { batches, batch_bytes, files, file_bytes, response_bytes } = kept;
        let queue = &self.inner.batches;
        let BatchOptions { max_batches, max_stored_bytes, .. } = *queue.options();
        let limits = [
            ("batches", (batches, max_batches)),
            ("batch_bytes", (batch_bytes, max_stored_bytes)),
            ("files", (files, max_batches)),
            ("file_bytes", (file_bytes, max_stored_bytes)),
            ("response_bytes", (response_bytes, queue.context().responses.max_stored_bytes)),
            ("request_log_bytes", self.host().reach.requests.kept_bytes()),
        ];
        let disk = self.kv_disk().map(|disk| ("kv_disk_bytes", (disk.used_bytes, disk.max_bytes)));
        limits.into_iter().chain(disk).map(|(name, (used, limit))| LimitUse { name, used, limit })
    }
}
