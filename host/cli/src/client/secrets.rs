//! Secrets of a running host.

use anyhow::Result;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Client, wire};

/// A secret without its value.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Secret {
    pub name: String,
    /// `None` means that it belongs to every agent that is granted it.
    pub agent: Option<String>,
    pub hosts: Vec<String>,
    pub updated_at_ms: u64,
}

impl Client {
    pub async fn set_secret(
        &self,
        name: &str,
        value: &str,
        hosts: &[String],
        agent: Option<&str>,
    ) -> Result<()> {
        let body = json!({"value": value, "hosts": hosts, "agent": agent});
        self.answer(self.request(Method::PUT, &["v1", "secrets", name])?.json(&body)).await.map(drop)
    }

    pub async fn secrets(&self) -> Result<Vec<Secret>> {
        let list: wire::List<Secret> = self.json(self.request(Method::GET, &["v1", "secrets"])?).await?;
        Ok(list.data)
    }

    pub async fn delete_secret(&self, name: &str, agent: Option<&str>) -> Result<()> {
        let request = self.request(Method::DELETE, &["v1", "secrets", name])?;
        self.answer(request.query(&[("agent", agent)])).await.map(drop)
    }
}
