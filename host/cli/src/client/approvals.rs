//! Tool calls that wait for a person's decision.

use anyhow::Result;
use reqwest::Method;
use skep_api::{Approval, ApprovalList, Decide, Decision};

use super::Client;

impl Client {
    /// Returns the waiting calls, oldest first.
    pub async fn approvals(&self) -> Result<Vec<Approval>> {
        let list: ApprovalList = self.json(self.request(Method::GET, &["v1", "approvals"])?).await?;
        Ok(list.data)
    }

    /// Decides about a call.
    pub async fn decide(&self, id: &str, decision: Decision, reason: Option<String>) -> Result<Approval> {
        let request = self.request(Method::POST, &["v1", "approvals", id])?;
        self.json(request.json(&Decide { decision: Some(decision), reason })).await
    }
}
