//! Calls that wait for people.

use super::AgentHost;
use crate::{Approval, RuntimeError, Tenant};

impl AgentHost {
    /// Returns the calls that wait for a person's decision, oldest first, of one tenant or of all.
    pub async fn approvals(
        &self,
        tenant: Option<&Tenant>,
        limit: u32,
    ) -> Result<Vec<Approval>, RuntimeError> {
        self.host().reach.approvals.pending(tenant, limit).await
    }

    /// Decides on a call and resumes its turn. If the call is denied, the reason is passed to the
    /// agent.
    pub async fn decide(
        &self,
        id: &str,
        approve: bool,
        reason: Option<String>,
        decided_by: &str,
    ) -> Result<Approval, RuntimeError> {
        self.host().reach.approvals.decide(id, approve, reason, decided_by).await
    }
}
