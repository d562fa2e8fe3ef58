//! The state of the host, for monitoring.

use super::AgentHost;
use crate::{RuntimeError, event::MAX_WAITING_DELIVERIES};
use skep_store::{DataPlace, DiskUse, OpenWork, QueuedWork};
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

/// How far one limit of the host is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LimitUse {
    /// The setting under `[runtime]` in skep.toml, or the name of a fixed bound.
    pub name: &'static str,
    pub used: u64,
    pub limit: u64,
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

    /// Returns the work of all tenants, and how far the limits of the host are used.
    pub async fn load(&self) -> Result<HostLoad, RuntimeError> {
        let host = self.host();
        let counted = async {
            let work = host.store.queued_work(host.clock.now_ms()).await?;
            Ok::<_, RuntimeError>((work, host.store.open_work().await?))
        };
        let slow = |_elapsed| RuntimeError::StoreStalled { waited_s: DEADLINE.as_secs() };
        let (work, OpenWork { dead_letters, .. }) = timeout(DEADLINE, counted).await.map_err(slow)??;
        let admission = &self.inner.dispatch.admission;
        let disk = self.disk_use();
        let free = disk.and_then(|disk| disk.free);
        let (waiting_bytes, instances) = (admission.taken_bytes(), host.instances.taken());
        let limits = [
            ("max_agents", (host.deployments.names().len(), self.inner.max_agents)),
            ("max_waiting_bytes", waiting_bytes),
            ("max_instances", instances),
            ("deliveries", ((work.events + work.webhooks) as usize, MAX_WAITING_DELIVERIES)),
        ];
        let limits =
            limits.map(|(name, (used, limit))| LimitUse { name, used: used as u64, limit: limit as u64 });
        Ok(HostLoad {
            work,
            waiting_messages: (admission.open_turns() as u64).saturating_sub(work.running_turns),
            dead_letters,
            data: host.store.place(),
            disk,
            is_disk_low: free.is_some_and(|free| free < self.inner.disk_warning_bytes),
            limits: limits.to_vec(),
        })
    }
}
