//! API keys of a running host.

use super::{Client, wire};
use anyhow::Result;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use skep_runtime::{AgentName, ApiKey, NewApiKey, Role, Tenant};
use std::num::NonZeroU32;

const DAY_MS: u64 = 24 * 3600 * 1000;

/// A key as the host reports it.
#[derive(Debug, Clone, Deserialize, Serialize)]
pub struct Key {
    pub id: String,
    pub tenant: String,
    pub role: String,
    /// Agents that the key may use; `None` is all of them.
    pub agents: Option<Vec<String>>,
    pub name: String,
    pub created_at_ms: u64,
    pub expires_at_ms: Option<u64>,
    pub revoked_at_ms: Option<u64>,
    /// Precise to the day.
    pub last_used_at_ms: Option<u64>,
    /// `None` means that only the limit of its tenant applies.
    pub requests_per_minute: Option<NonZeroU32>,
    /// The key itself, which the host shows only once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
}

/// A key to be created, as the host reads it.
#[derive(Debug, Serialize)]
struct NewKey {
    tenant: Tenant,
    role: Role,
    #[serde(skip_serializing_if = "Option::is_none")]
    agents: Option<Vec<AgentName>>,
    name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_in_s: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    requests_per_minute: Option<NonZeroU32>,
}

impl Client {
    pub async fn create_key(&self, new: NewApiKey) -> Result<Key> {
        let NewApiKey { tenant, role, agents, name, expires_in, requests_per_minute } = new;
        let expires_in_s = expires_in.map(|time| time.as_secs());
        let new = NewKey { tenant, role, agents, name, expires_in_s, requests_per_minute };
        self.json(self.request(Method::POST, &["v1", "keys"])?.json(&new)).await
    }

    /// Returns the keys, oldest first.
    pub async fn keys(&self) -> Result<Vec<Key>> {
        let list: wire::List<Key> = self.json(self.request(Method::GET, &["v1", "keys"])?).await?;
        Ok(list.data)
    }

    pub async fn revoke_key(&self, id: &str) -> Result<Key> {
        self.json(self.request(Method::DELETE, &["v1", "keys", id])?).await
    }
}

impl From<ApiKey> for Key {
    fn from(key: ApiKey) -> Self {
        Key {
            id: key.id,
            tenant: key.tenant.to_string(),
            role: key.role.to_string(),
            agents: key.agents.map(|agents| agents.iter().map(AgentName::to_string).collect()),
            name: key.name,
            created_at_ms: key.created_at_ms,
            expires_at_ms: key.expires_at_ms,
            revoked_at_ms: key.revoked_at_ms,
            last_used_at_ms: key.last_used_day.map(|day| u64::from(day) * DAY_MS),
            requests_per_minute: key.requests_per_minute,
            key: None,
        }
    }
}
