//! Work that a restored host holds.

use anyhow::Result;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::Client;

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Held {
    pub is_restored: bool,
    pub backup_at_ms: Option<u64>,
    pub restored_at_ms: Option<u64>,
    pub turns: u64,
    pub deliveries: u64,
    pub schedules: u64,
    pub batches: u64,
}

impl Client {
    pub async fn held(&self) -> Result<Held> {
        self.json(self.request(Method::GET, &["v1", "held"])?).await
    }

    /// Decides about the held work; `decision` is `resume` or `drop`. Returns what was held.
    pub async fn decide_held(&self, decision: &str) -> Result<Held> {
        self.json(self.request(Method::POST, &["v1", "held"])?.json(&json!({ "decision": decision }))).await
    }
}
