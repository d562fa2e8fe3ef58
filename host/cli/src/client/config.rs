//! The configuration of a running host.

use super::Client;
use anyhow::Result;
use reqwest::Method;
use skep_api::{Config, ConfigReload};

impl Client {
    /// Returns the configuration that the host uses.
    pub async fn config(&self) -> Result<Config> {
        self.json(self.request(Method::GET, &["v1", "config"])?).await
    }

    /// Makes the host read its file of settings again, and returns what changed.
    pub async fn reload_config(&self) -> Result<ConfigReload> {
        self.json(self.request(Method::POST, &["v1", "config", "reload"])?).await
    }
}
