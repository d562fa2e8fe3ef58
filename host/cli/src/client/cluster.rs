//! The hosts of a cluster.

use anyhow::Result;
use reqwest::Method;
use skep_api::ClusterHosts;

use super::Client;

impl Client {
    /// Returns the hosts of the cluster.
    pub async fn cluster(&self) -> Result<ClusterHosts> {
        self.json(self.request(Method::GET, &["v1", "cluster"])?).await
    }

    /// Asks a host to hand its sessions over and to end.
    pub async fn drain_host(&self, number: i64) -> Result<()> {
        let number = number.to_string();
        let path = ["v1", "cluster", "hosts", &number, "drain"];
        self.answer(self.request(Method::POST, &path)?).await.map(drop)
    }
}
