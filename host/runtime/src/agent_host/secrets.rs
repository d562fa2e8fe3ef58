//! The operator's secrets. Values can be set but are never returned.

use super::AgentHost;
use crate::{AgentName, RuntimeError, SecretName, SecretSummary, vault::Vault};
use skep_outbound::{Origin, Origins, Url};
use std::sync::Arc;

/// Reads secrets for the host's own requests, such as those to upstream models. Clones share the vault.
#[derive(Clone)]
pub struct SecretReader(Arc<Vault>);

impl SecretReader {
    /// Returns the value of a secret that belongs to no agent, if it may be sent to the address.
    pub async fn read(&self, name: &str, address: &Url) -> Result<String, RuntimeError> {
        let invalid = |message: String| RuntimeError::InvalidSecret { name: name.to_owned(), message };
        let origin = Origin::of(address).map_err(|error| invalid(error.to_string()))?;
        let name = SecretName::new(name)?;
        let found = self.0.open(HOST, |known| known == name.as_str()).await?.pop();
        let secret =
            found.ok_or_else(|| RuntimeError::SecretNotFound { name: name.to_string(), agent: None })?;
        if !secret.hosts.allows(&origin) {
            let (name, to) = (&secret.name, address.origin().ascii_serialization());
            return Err(invalid(format!(
                "it may not be sent to {to}; set it again with `skep secret set {name} --to {to}`"
            )));
        }
        Ok(secret.value)
    }
}

/// Stands where the name of an agent would, so that only secrets of all agents are found.
const HOST: &str = "";

impl AgentHost {
    /// Returns a reader of the operator's secrets for the host's own requests.
    pub fn secret_reader(&self) -> SecretReader {
        SecretReader(self.host().reach.egress.vault.clone())
    }

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

    /// Deletes a secret of one agent, or without `agent` that of all agents. Fails if there is none.
    pub async fn delete_secret(&self, agent: Option<&str>, name: &str) -> Result<(), RuntimeError> {
        let agent = agent.map(AgentName::new).transpose()?;
        self.host().reach.egress.vault.delete(agent.as_ref(), &SecretName::new(name)?).await
    }
}
