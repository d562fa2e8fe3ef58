//! KV pages on disk.

use anyhow::Result;
use reqwest::Method;
use skep_api::{KvDisk, KvPurged};

use super::Client;

impl Client {
    /// Returns the state of the KV pages on disk.
    pub async fn kv_disk(&self) -> Result<KvDisk> {
        self.json(self.request(Method::GET, &["v1", "kv"])?).await
    }

    /// Erases the pages that the filter describes.
    pub async fn purge_kv_disk(&self, filter: &[(&str, Option<String>)]) -> Result<KvPurged> {
        self.json(self.request(Method::DELETE, &["v1", "kv"])?.query(filter)).await
    }
}
