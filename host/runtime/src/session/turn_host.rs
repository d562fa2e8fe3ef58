//! The parts of the host that the turns of all sessions use.

use crate::{
    Clock, agent_log::AgentLog, capability::Reach, cluster::Cluster, deployment::Deployments, event::Outbox,
    feed::LiveTurns, guest::Instances, limits::RecentUse, session_changes::SessionChanges,
    shutdown::Shutdown, use_queue::UseQueue,
};
use skep_store::Store;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Maximum number of resumed turns that load their message and session into memory at once.
const MAX_RESUMING: usize = 32;

pub(crate) struct TurnHost {
    pub(crate) store: Store,
    pub(crate) clock: Clock,
    pub(crate) shutdown: Shutdown,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) log: AgentLog,
    pub(crate) deployments: Arc<Deployments>,
    pub(crate) instances: Instances,
    pub(crate) live: Arc<LiveTurns>,
    pub(crate) recent_use: RecentUse,
    pub(crate) reach: Reach,
    pub(crate) uses: UseQueue,
    pub(crate) resuming: ResumePermits,
    pub(crate) changes: SessionChanges,
    pub(crate) cluster: Cluster,
}

/// Permits for turns that are being resumed.
pub(crate) struct ResumePermits(Arc<Semaphore>);

impl Default for ResumePermits {
    fn default() -> Self {
        ResumePermits(Arc::new(Semaphore::new(MAX_RESUMING)))
    }
}

impl TurnHost {
    /// Waits until one more resumed turn may have its message in memory.
    pub(crate) async fn resume_permit(&self) -> OwnedSemaphorePermit {
        self.resuming.0.clone().acquire_owned().await.expect("the semaphore is never closed")
    }
}
