//! Clients of asynchronous batches: each queues a batch through one host, and asks any host for its results. The items run at
//! whichever hosts have room.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rand::RngExt as _;
use rand::rngs::StdRng;
use serde_json::{Value, json};

use super::history::{Batch, BatchOutcome, Row};
use super::hosts::Address;
use super::world::{AGENT, ANSWER, PAUSE, World};

/// Items of a batch.
const ITEMS: usize = 3;
/// Delay before a batch is asked for again.
const LOOK: Duration = Duration::from_millis(100);

impl World {
    /// Queues one batch after the other, until the load ends.
    pub(super) async fn queue_batches(self: Arc<Self>, client: usize, mut draws: StdRng) {
        let mut number = 0;
        while !self.has_ended() {
            let Some(address) = self.addresses.pick(draws.random()) else {
                tokio::time::sleep(PAUSE).await;
                continue;
            };
            number += 1;
            let id = format!("{}-b{client}-{number}", self.run);
            let items: Vec<String> = (0..ITEMS).map(|item| format!("{id}-{item}")).collect();
            let outcome = match self.queue(&address, &id, &items).await {
                Some(queued) => self.results(&id, &queued, &mut draws).await,
                None => BatchOutcome::Unknown,
            };
            self.enter_batch(Batch { id, items, outcome });
            tokio::time::sleep(LOOK).await;
        }
    }

    /// Queues a batch, and returns the host's id of it. `None` if no host has acknowledged it.
    async fn queue(&self, address: &Address, id: &str, items: &[String]) -> Option<String> {
        let request = |item: &String| {
            let order = json!({"op": "batch", "id": item, "url": self.outside.url}).to_string();
            json!({"messages": [{"role": "user", "content": order}], "external_reference": item})
        };
        let body = json!({"requests": items.iter().map(request).collect::<Vec<_>>()});
        let url = format!("{}/ai/run/agent:{AGENT}?queueRequest=true", address.url);
        let answer = self.http.post(url).json(&body).send().await.ok()?;
        let status = answer.status().as_u16();
        let body: Value = answer.json().await.ok()?;
        match (status, body["result"]["request_id"].as_str()) {
            (200..=299, Some(queued)) => return Some(queued.to_owned()),
            (404 | 408 | 409 | 425 | 429 | 499 | 500..=599, _) => return None,
            _ => {}
        }
        self.trouble(format!("the batch {id} was answered with {status} {body}"));
        None
    }

    /// Asks one host after the other for a batch until it has ended.
    async fn results(&self, id: &str, queued: &str, draws: &mut StdRng) -> BatchOutcome {
        let until = Instant::now() + ANSWER;
        let mut why = "no host runs".to_owned();
        while Instant::now() < until {
            tokio::time::sleep(LOOK).await;
            let Some(address) = self.addresses.pick(draws.random()) else { continue };
            let url = format!("{}/ai/run/agent:{AGENT}", address.url);
            let answer = match self.http.post(url).json(&json!({"request_id": queued})).send().await {
                Ok(answer) => answer,
                Err(error) => {
                    why = error.to_string();
                    continue;
                }
            };
            let status = answer.status().as_u16();
            let body: Value = answer.json().await.unwrap_or_default();
            match (status, body["result"]["responses"].as_array()) {
                (200, Some(responses)) => return BatchOutcome::Ended(responses.iter().map(row).collect()),
                (404, _) => return BatchOutcome::Gone,
                _ => why = format!("{status} {body}"),
            }
        }
        self.trouble(format!("the batch {id} has not ended after {} s: {why}", ANSWER.as_secs()));
        BatchOutcome::Unknown
    }
}

/// Reads the result of an item.
fn row(response: &Value) -> Row {
    let item = response["external_reference"].as_str().unwrap_or_default().to_owned();
    Row { item, is_done: response["success"] == true && response["result"]["response"] == "done" }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_item_is_done_only_if_its_agent_says_so() {
        for (response, is_done) in [
            (json!({"success": true, "external_reference": "a", "result": {"response": "done"}}), true),
            (json!({"success": true, "external_reference": "a", "result": {"response": "failed"}}), false),
            (json!({"success": false, "external_reference": "a", "error": {"code": 500}}), false),
        ] {
            assert_eq!(row(&response), Row { item: "a".to_owned(), is_done }, "{response}");
        }
    }
}
