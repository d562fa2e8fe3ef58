//! The people who decide about calls that wait for an approval: each decision is made through any host, and now and then two of
//! them decide differently through two hosts at the same time.

use std::sync::Arc;
use std::time::Duration;

use rand::RngExt as _;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::history::{Decision, Verdict};
use super::hosts::Address;
use super::world::World;

/// Delay before the next look at the calls that wait.
const LOOK: Duration = Duration::from_millis(100);

impl World {
    /// Decides about all calls that wait. It ends only when it is dropped, because calls of turns that nobody waits for need a
    /// decision, too.
    pub(super) async fn decide(self: Arc<Self>, mut draws: StdRng) {
        loop {
            tokio::time::sleep(LOOK).await;
            for (approval, about) in self.waiting(draws.random()).await {
                let approves = draws.random_ratio(3, 4);
                let Some(one) = self.addresses.pick(draws.random()) else { continue };
                match self.addresses.pick(draws.random()).filter(|_| draws.random_ratio(1, 3)) {
                    Some(other) => {
                        tokio::join!(
                            self.decide_once(&one, &approval, &about, approves),
                            self.decide_once(&other, &approval, &about, !approves)
                        );
                    }
                    None => self.decide_once(&one, &approval, &about, approves).await,
                }
            }
        }
    }

    /// Returns the calls that wait, as one host lists them: their ids, and those of the messages that they are about.
    async fn waiting(&self, draw: u32) -> Vec<(String, String)> {
        let Some(address) = self.addresses.pick(draw) else { return Vec::new() };
        let Ok(answer) = self.http.get(format!("{}/v1/approvals", address.url)).send().await else {
            return Vec::new();
        };
        let listed: Value = answer.json().await.unwrap_or_default();
        let listed = listed["data"].as_array().map(Vec::as_slice).unwrap_or_default().iter();
        let texts = |approval: &Value| {
            let (id, about) = (approval["id"].as_str()?, approval["arguments"]["id"].as_str()?);
            Some((id.to_owned(), about.to_owned()))
        };
        listed.filter_map(texts).collect()
    }

    async fn decide_once(&self, address: &Address, approval: &str, about: &str, approves: bool) {
        let decision = if approves { "approve" } else { "deny" };
        let url = format!("{}/v1/approvals/{approval}", address.url);
        let answer = self.http.post(url).json(&json!({"decision": decision})).send().await;
        let verdict = match answer.map(|answer| answer.status().as_u16()) {
            Ok(200) => Verdict::Accepted,
            Ok(404 | 409) => Verdict::Late,
            Ok(408 | 425 | 429 | 499 | 500..) | Err(_) => Verdict::Unknown,
            Ok(status) => {
                self.trouble(format!("a decision about {about} was answered with {status}"));
                Verdict::Unknown
            }
        };
        let (approval, about) = (approval.to_owned(), about.to_owned());
        self.enter_decision(Decision { approval, about, approves, verdict });
    }
}
