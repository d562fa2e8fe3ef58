//! Secrets of a running host.

use anyhow::Result;
use reqwest::Method;
use skep_api::{NewSecret, Secret, SecretList};

use super::Client;

impl Client {
    /// Sets the value of a secret, and the origins to which it may be sent.
    pub async fn set_secret(
        &self,
        name: &str,
        value: &str,
        hosts: &[String],
        agent: Option<&str>,
    ) -> Result<()> {
        let (value, hosts) = (value.to_owned(), hosts.to_vec());
        let body = NewSecret { value, hosts, agent: agent.map(str::to_owned) };
        self.answer(self.request(Method::PUT, &["v1", "secrets", name])?.json(&body)).await.map(drop)
    }

    /// Returns the secrets, without their values.
    pub async fn secrets(&self) -> Result<Vec<Secret>> {
        let list: SecretList = self.json(self.request(Method::GET, &["v1", "secrets"])?).await?;
        Ok(list.data)
    }

    /// Deletes a secret of an agent, or one that all agents share.
    pub async fn delete_secret(&self, name: &str, agent: Option<&str>) -> Result<()> {
        let request = self.request(Method::DELETE, &["v1", "secrets", name])?;
        self.answer(request.query(&[("agent", agent)])).await.map(drop)
    }
}
