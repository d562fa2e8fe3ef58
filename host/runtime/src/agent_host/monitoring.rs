//! The state of the host, for monitoring.

use super::AgentHost;
use crate::RuntimeError;
use skep_store::{DiskUse, OpenWork};

impl AgentHost {
    /// Returns the number of open turns, approvals and dead letters of all tenants.
    pub async fn open_work(&self) -> Result<OpenWork, RuntimeError> {
        Ok(self.host().store.open_work().await?)
    }

    /// Returns the disk usage of the database, or `None` if it is in memory.
    pub fn disk_use(&self) -> Option<DiskUse> {
        self.host().store.disk_use()
    }
}
