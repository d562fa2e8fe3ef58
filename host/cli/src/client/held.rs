//! Work that a restored host holds.

use anyhow::Result;
use reqwest::Method;
use skep_api::{DecideHeld, Held, HeldDecision};

use super::Client;

impl Client {
    /// Returns the work that the host holds.
    pub async fn held(&self) -> Result<Held> {
        self.json(self.request(Method::GET, &["v1", "held"])?).await
    }

    /// Decides about the held work. Returns what was held.
    pub async fn decide_held(&self, decision: HeldDecision) -> Result<Held> {
        let decision = DecideHeld { decision: Some(decision) };
        self.json(self.request(Method::POST, &["v1", "held"])?.json(&decision)).await
    }
}
