//! The operator: deploys the agent again and again, and rolls back to earlier versions.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::Value;

use super::books::Reported;
use super::{AGENT, Storm, TURN_MS};

impl Storm {
    /// Deploys the agent and rolls it back in turns, until the load ends.
    pub(super) async fn change_versions(self: Arc<Self>) {
        let mut draws = StdRng::seed_from_u64(self.plan.seed);
        let mut number = 0;
        while !self.has_ended() {
            tokio::time::sleep(Duration::from_millis(draws.random_range(300..1_500))).await;
            number += 1;
            if draws.random_ratio(2, 3) {
                self.deploy_next(number).await;
            } else {
                self.put_back().await;
            }
        }
    }

    /// Deploys a version, and checks that the active manifest is the last one that was acknowledged.
    async fn deploy_next(&self, number: u64) {
        let turn_ms = TURN_MS + number;
        let manifest = self.manifest(AGENT, turn_ms, &self.grants());
        let answer = self.deploy(&manifest).await;
        if !matches!(answer.status, 200 | 201) {
            self.trouble(format!("deployment {number}: {} {}", answer.status, answer.body));
            return;
        }
        let active = self.active().await;
        let text = active["manifest"].as_str().unwrap_or_default();
        let is_it = text.contains(&format!("turn_ms = {turn_ms}\n"));
        self.books.found("deploy", &number.to_string(), Reported::Done, usize::from(is_it));
    }

    /// Rolls back by one version. Nobody else changes versions, so a rollback whose answer was lost can be
    /// looked up.
    async fn put_back(&self) {
        let before = self.active().await;
        let Some(version) = before["version"].as_u64().filter(|version| *version > 1) else { return };
        let body = serde_json::json!({ "version": version - 1 });
        let answer =
            self.ask(|http, url| http.post(format!("{url}/v1/agents/{AGENT}/rollback")).json(&body)).await;
        if answer.status != 200 {
            // Only a limited number of versions is kept.
            if answer.code() != "version_not_found" {
                self.trouble(format!("rollback to {}: {} {}", version - 1, answer.status, answer.body));
            }
            return;
        }
        let is_it = self.active().await["version"].as_u64() == Some(version - 1);
        self.books.found("rollback", &format!("{}", version - 1), Reported::Done, usize::from(is_it));
    }

    async fn active(&self) -> Value {
        let answer = self.ask(|http, url| http.get(format!("{url}/v1/agents/{AGENT}/versions"))).await;
        let versions = answer.body["data"].as_array().cloned().unwrap_or_default();
        versions.into_iter().find(|version| version["in_force"] == true).unwrap_or_default()
    }
}
