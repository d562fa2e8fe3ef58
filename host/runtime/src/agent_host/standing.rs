//! How the host stands, for those who watch it.

use super::AgentHost;
use crate::RuntimeError;
use skep_store::{DiskUse, OpenWork};
use std::time::Duration;

/// A store that needs longer for a few bytes keeps turns waiting as well.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);

impl AgentHost {
    /// Whether a turn could be committed now: writes a few bytes where turns are written, behind those that wait there.
    pub async fn check_store(&self) -> Result<(), RuntimeError> {
        let check = tokio::time::timeout(CHECK_TIMEOUT, self.inner.services.store.check());
        Ok(check.await.map_err(|_| RuntimeError::StoreStalled { waited_s: CHECK_TIMEOUT.as_secs() })??)
    }

    /// Turns, approvals and dead letters that are open, of all tenants.
    pub async fn open_work(&self) -> Result<OpenWork, RuntimeError> {
        Ok(self.inner.services.store.open_work().await?)
    }

    /// What the database takes of the disk; `None` if it is in memory.
    pub fn disk_use(&self) -> Option<DiskUse> {
        self.inner.services.store.disk_use()
    }
}
