//! API keys of a running host.

use super::Client;
use anyhow::Result;
use reqwest::Method;
use skep_api::{Key, KeyList, NewKey, Role};
use skep_runtime::NewApiKey;

impl Client {
    /// Creates an API key. Only this answer contains the key itself.
    pub async fn create_key(&self, new: NewApiKey) -> Result<Key> {
        let NewApiKey { tenant, role, agents, name, expires_in, requests_per_minute, bodies } = new;
        let new = NewKey {
            tenant: tenant.to_string(),
            role: Role::from(role.as_str()),
            agents: agents.map(|agents| agents.iter().map(ToString::to_string).collect()),
            name,
            expires_in_s: expires_in.map(|time| time.as_secs()),
            requests_per_minute,
            bodies,
        };
        self.json(self.request(Method::POST, &["v1", "keys"])?.json(&new)).await
    }

    /// Returns the keys, oldest first.
    pub async fn keys(&self) -> Result<Vec<Key>> {
        let list: KeyList = self.json(self.request(Method::GET, &["v1", "keys"])?).await?;
        Ok(list.data)
    }

    /// Revokes an API key.
    pub async fn revoke_key(&self, id: &str) -> Result<Key> {
        self.json(self.request(Method::DELETE, &["v1", "keys", id])?).await
    }
}
