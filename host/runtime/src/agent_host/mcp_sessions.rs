//! The sessions of MCP clients, which another host of the cluster continues when theirs is gone. Whoever serves them gives their
//! state a meaning; without a cluster there is nothing to record.

use super::AgentHost;
use crate::{RuntimeError, SessionPlace};
use skep_store::{McpSessionKey, TakenMcpSession};
use std::time::Duration;

impl AgentHost {
    /// Records a session that this host has begun. Returns the epoch under which the host has it; `None` without a cluster.
    pub async fn add_mcp_session(
        &self,
        key: McpSessionKey,
        state: String,
    ) -> Result<Option<u64>, RuntimeError> {
        Ok(self.host().store.add_mcp_session(key, state).await?)
    }

    /// Returns where requests for a session go that this host does not have: to the live host that has it, also while that host
    /// drains, because only there are the answers to what it has asked the client expected.
    pub async fn place_of_mcp_session(&self, id: &str) -> Result<SessionPlace, RuntimeError> {
        let cluster = &self.host().cluster;
        let Some(owner) = self.host().store.host_of_mcp_session(id).await? else {
            return Ok(SessionPlace::Here);
        };
        if cluster.find(owner).is_none() {
            // It has started since the last look.
            cluster.refresh().await?;
        }
        let found = cluster.find(owner).filter(|_| owner != cluster.own_number());
        Ok(found.map_or(SessionPlace::Here, |(member, _)| SessionPlace::There(member)))
    }

    /// Takes a session over whose host is gone, if it is that of this caller and was used within this time. `None` means that the
    /// session does not exist, or that another host has it.
    pub async fn take_mcp_session(
        &self,
        key: McpSessionKey,
        unused: Duration,
    ) -> Result<Option<TakenMcpSession>, RuntimeError> {
        let unused_ms = u64::try_from(unused.as_millis()).unwrap_or(u64::MAX);
        Ok(self.host().store.take_mcp_session(key, unused_ms).await?)
    }

    /// Records the state of a session that this host has under an epoch, and that it is in use. Returns `false` if another host has
    /// it now, or none.
    pub async fn note_mcp_session(&self, id: &str, epoch: u64, state: String) -> Result<bool, RuntimeError> {
        Ok(self.host().store.note_mcp_session(id, epoch, state).await?)
    }

    /// Removes the record of a session that has ended at this host, which had it under an epoch. `None` stands for an epoch that this
    /// host has not learned.
    pub async fn end_mcp_session(&self, id: &str, epoch: Option<u64>) -> Result<(), RuntimeError> {
        Ok(self.host().store.end_mcp_session(id, epoch).await?)
    }
}
