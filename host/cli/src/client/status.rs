//! The status of a running host.

use anyhow::Result;
use reqwest::Method;
use skep_api::HostStatus;

use super::Client;

impl Client {
    /// Returns what the host is doing.
    pub async fn status(&self) -> Result<HostStatus> {
        self.json(self.request(Method::GET, &["v1", "status"])?).await
    }
}
