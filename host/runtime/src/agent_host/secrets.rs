//! The operator's secrets. Values can be set but are never returned.

use super::AgentHost;
use crate::{AgentName, RuntimeError, SecretName, SecretSummary};
use skep_outbound::Origins;

impl AgentHost {
    /// Sets a secret of one agent, or of all agents that are granted it, and the origins to which
    /// it may be sent.
    pub async fn set_secret(
        &self,
        agent: Option<&str>,
        name: &str,
        value: &str,
        hosts: &Origins,
    ) -> Result<(), RuntimeError> {
        let agent = agent.map(AgentName::new).transpose()?;
        self.host().reach.egress.vault.set(agent.as_ref(), &SecretName::new(name)?, value, hosts).await
    }

    /// Returns all secrets, without their values.
    pub async fn secrets(&self) -> Result<Vec<SecretSummary>, RuntimeError> {
        self.host().reach.egress.vault.list().await
    }

    pub async fn delete_secret(&self, agent: Option<&str>, name: &str) -> Result<(), RuntimeError> {
        let agent = agent.map(AgentName::new).transpose()?;
        self.host().reach.egress.vault.delete(agent.as_ref(), &SecretName::new(name)?).await
    }
}
