//! Tool calls that wait for a person's decision.

use anyhow::Result;
use reqwest::Method;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Client, wire};

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Approval {
    pub id: String,
    pub agent: String,
    pub session: String,
    pub turn_id: String,
    pub tool: String,
    pub arguments: Value,
    pub created_at_ms: u64,
    pub expires_at_ms: u64,
}

impl Client {
    /// Returns the waiting calls, oldest first.
    pub async fn approvals(&self) -> Result<Vec<Approval>> {
        let list: wire::List<Approval> = self.json(self.request(Method::GET, &["v1", "approvals"])?).await?;
        Ok(list.data)
    }

    /// Decides about a call; `decision` is `approve` or `deny`.
    pub async fn decide(&self, id: &str, decision: &str, reason: Option<&str>) -> Result<Approval> {
        let request = self.request(Method::POST, &["v1", "approvals", id])?;
        self.json(request.json(&json!({"decision": decision, "reason": reason}))).await
    }
}
