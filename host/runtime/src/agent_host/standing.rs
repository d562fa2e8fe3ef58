//! How the host stands, for those who watch it.

use super::AgentHost;
use crate::RuntimeError;
use skep_store::{DiskUse, OpenWork};

impl AgentHost {
    /// Turns, approvals and dead letters that are open, of all tenants.
    pub async fn open_work(&self) -> Result<OpenWork, RuntimeError> {
        Ok(self.inner.services.store.open_work().await?)
    }

    /// What the database takes of the disk; `None` if it is in memory.
    pub fn disk_use(&self) -> Option<DiskUse> {
        self.inner.services.store.disk_use()
    }
}
