//! Clients: each one places one order after the other in a session, and leaves the session after a while.

use std::sync::Arc;
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use super::books::{Evidence, Reported};
use super::sessions::Ledger;
use super::{AGENT, Response, Storm};

/// Orders per session; there are few, so that prompts stay short.
const ORDERS: usize = 8;
/// Items per batch.
const ITEMS: usize = 3;

/// The kinds of orders, each with its relative frequency.
const KINDS: [(Kind, u32); 13] = [
    (Kind::Turn("post"), 3),
    (Kind::Turn("keyed"), 3),
    (Kind::Turn("call"), 3),
    (Kind::Turn("mcp"), 2),
    (Kind::Turn("pay"), 2),
    (Kind::Turn("alarm"), 2),
    (Kind::Turn("emit"), 2),
    (Kind::Turn("generate"), 3),
    (Kind::Event, 2),
    (Kind::Batch, 1),
    (Kind::Cancelled, 1),
    (Kind::LeftAlone, 1),
    (Kind::Plain, 1),
];

#[derive(Clone, Copy, Debug)]
enum Kind {
    /// A message with an idempotency key, whose agent does this.
    Turn(&'static str),
    /// An event from outside, for a session and for the webhook.
    Event,
    Batch,
    /// A turn that is accepted, and then cancelled by its id.
    Cancelled,
    /// A stream whose client disconnects in the middle.
    LeftAlone,
    /// A message without a key: if its answer is lost, nobody knows the outcome.
    Plain,
}

impl Storm {
    /// Runs one client until the load ends.
    pub(super) async fn work(self: Arc<Self>, worker: usize) {
        let mut draws = StdRng::seed_from_u64(self.plan.seed.wrapping_mul(1_000).wrapping_add(worker as u64));
        // A load that is started again has different ids.
        let load = self.outside.ticks.borrow().to_string();
        let mut number = 0;
        while !self.has_ended() {
            let session = format!("w{worker}-{load}-{number}");
            let mut ledger = Ledger::new(session);
            for _ in 0..ORDERS {
                number += 1;
                let id = format!("o{worker}-{load}-{number}");
                self.order(draw(&mut draws), &id, &mut ledger, &mut draws).await;
                if self.has_ended() {
                    break;
                }
            }
            self.leave(ledger, &mut draws).await;
        }
    }

    async fn order(&self, kind: Kind, id: &str, ledger: &mut Ledger, draws: &mut StdRng) {
        match kind {
            Kind::Turn(op) => self.turn(op, id, ledger).await,
            Kind::Event => self.event(id, ledger).await,
            Kind::Batch => self.batch(id).await,
            Kind::Cancelled => self.cancelled(id, ledger, draws).await,
            Kind::LeftAlone => self.left_alone(id, ledger).await,
            Kind::Plain => self.plain(id, ledger).await,
        }
    }

    fn data(&self, op: &str, id: &str, ledger: &Ledger) -> Value {
        let others = format!("e-{}", ledger.session);
        json!({"data": {"op": op, "id": id, "url": self.outside.url, "session": others}})
    }

    async fn turn(&self, op: &'static str, id: &str, ledger: &mut Ledger) {
        let (path, body) = (ledger.messages(), self.data(op, id, ledger));
        let answer = self
            .ask(|http, url| http.post(format!("{url}{path}")).header("idempotency-key", id).json(&body))
            .await;
        let reported = self.reported(&answer, id);
        ledger.enter(id, &reported);
        match op {
            "alarm" => ledger.awaits("alarm", id, &reported),
            "emit" => ledger.awaits("event", id, &reported),
            _ => {}
        }
        self.enter(op, id, reported);
    }

    /// Records where the effects of an order are counted.
    fn enter(&self, op: &'static str, id: &str, reported: Reported) {
        match op {
            // Its effect is in the ledger.
            "generate" => {}
            "emit" => {
                // The event goes to a session and to the webhook.
                self.books.enter("event", Evidence::Effect, id, reported.clone());
                self.books.enter("webhook", Evidence::Hook, id, reported);
            }
            op => self.books.enter(op, Evidence::Effect, id, reported),
        }
    }

    fn reported(&self, answer: &Response, id: &str) -> Reported {
        match (answer.status, answer.body["data"]["outcome"].as_str()) {
            (200, Some("done")) => Reported::Done,
            (200, Some("interrupted")) => Reported::Interrupted,
            (200, Some(reported)) => Reported::Failed(reported.to_owned()),
            (0, _) => Reported::Failed("no answer".to_owned()),
            _ => {
                let code = answer.code();
                if !matches!(code.as_str(), "turn_lost" | "cancelled" | "interrupted") {
                    self.trouble(format!("order {id}: {} {}", answer.status, answer.body));
                }
                Reported::Failed(code)
            }
        }
    }

    async fn event(&self, id: &str, ledger: &mut Ledger) {
        let data = self.data("", id, ledger)["data"].take();
        let body = json!({"topic": "storm.sent", "id": id, "source": "bench", "data": data});
        let answer = self.ask(|http, url| http.post(format!("{url}/v1/events")).json(&body)).await;
        let reported = match answer.status {
            200..=299 => Reported::Done,
            _ => self.reported(&answer, id),
        };
        ledger.awaits("event", id, &reported);
        self.books.enter("event", Evidence::Effect, id, reported.clone());
        self.books.enter("webhook", Evidence::Hook, id, reported);
    }

    async fn batch(&self, id: &str) {
        let ids: Vec<String> = (0..ITEMS).map(|item| format!("{id}-{item}")).collect();
        let request = |id: &String| {
            let order = json!({"op": "batch", "id": id, "url": self.outside.url}).to_string();
            json!({"messages": [{"role": "user", "content": order}]})
        };
        let body = json!({"requests": ids.iter().map(request).collect::<Vec<_>>()});
        // A batch has no key: it is not sent again if its answer is lost.
        let url = self.host().await;
        let path = format!("{url}/ai/run/agent:{AGENT}?queueRequest=true");
        let reported = match self.http.post(path).json(&body).send().await {
            Ok(answer) if answer.status().is_success() => match answer.bytes().await {
                Ok(_) => Reported::Done,
                Err(_) => Reported::Unsure,
            },
            Ok(answer) => {
                let (status, text) = (answer.status(), answer.text().await.unwrap_or_default());
                if !matches!(status.as_u16(), 429 | 503) {
                    self.trouble(format!("batch {id}: {status} {text}"));
                }
                Reported::Failed(status.as_u16().to_string())
            }
            Err(_) => Reported::Unsure,
        };
        self.outside.tick();
        for id in ids {
            self.books.enter("batch", Evidence::Effect, &id, reported.clone());
        }
    }

    async fn cancelled(&self, id: &str, ledger: &mut Ledger, draws: &mut StdRng) {
        let (path, body) = (ledger.messages(), self.data("keyed", id, ledger));
        let accepted = self
            .ask(|http, url| {
                let request = http.post(format!("{url}{path}")).header("idempotency-key", id);
                request.header("prefer", "respond-async").json(&body)
            })
            .await;
        let Some(turn) = accepted.body["turn_id"].as_str() else {
            let reported = self.reported(&accepted, id);
            ledger.enter(id, &reported);
            return self.books.enter("keyed", Evidence::Effect, id, reported);
        };
        tokio::time::sleep(Duration::from_millis(draws.random_range(0..30))).await;
        let turn = format!("{}/turns/{turn}", ledger.path());
        self.ask(|http, url| http.delete(format!("{url}{turn}"))).await;
        let reported = loop {
            let answer = self.ask(|http, url| http.get(format!("{url}{turn}"))).await;
            match answer.body["state"].as_str() {
                Some("done") => break Reported::Done,
                Some("waiting" | "running") => tokio::time::sleep(Duration::from_millis(20)).await,
                Some(_) => break Reported::Failed("cancelled".to_owned()),
                None => break Reported::Failed(answer.code()),
            }
        };
        ledger.enter(id, &reported);
        self.books.enter("keyed", Evidence::Effect, id, reported);
    }

    /// Sends a message and disconnects. The turn ends with its client, unless it has finished before.
    async fn left_alone(&self, id: &str, ledger: &mut Ledger) {
        let (path, body) = (ledger.messages(), self.data("generate", id, ledger));
        let url = self.host().await;
        let request = self.http.post(format!("{url}{path}")).header("accept", "text/event-stream");
        if let Ok(mut stream) = request.json(&body).send().await {
            let _ = stream.chunk().await;
        }
        self.outside.tick();
        ledger.enter(id, &Reported::Unsure);
    }

    async fn plain(&self, id: &str, ledger: &mut Ledger) {
        let (path, body) = (ledger.messages(), self.data("post", id, ledger));
        let url = self.host().await;
        let reported = match self.http.post(format!("{url}{path}")).json(&body).send().await {
            Ok(answer) => {
                let status = answer.status().as_u16();
                match answer.json::<Value>().await {
                    Ok(body) => self.reported(&Response { status, body, is_repeated: false }, id),
                    Err(_) => Reported::Unsure,
                }
            }
            Err(_) => Reported::Unsure,
        };
        self.outside.tick();
        ledger.enter(id, &reported);
        self.books.enter("post", Evidence::Effect, id, reported);
    }

    /// Plays the person who approves every call.
    pub(super) async fn approve(self: Arc<Self>) {
        // The last calls need an approval too; the task finishes once no call has waited for a while.
        let mut quiet = 0;
        while !self.has_ended() || quiet < 50 {
            quiet = if self.has_ended() { quiet + 1 } else { 0 };
            tokio::time::sleep(Duration::from_millis(100)).await;
            let waiting = self.ask(|http, url| http.get(format!("{url}/v1/approvals"))).await;
            for approval in waiting.body["data"].as_array().into_iter().flatten() {
                quiet = 0;
                let Some(id) = approval["id"].as_str() else { continue };
                let answer = self
                    .ask(|http, url| {
                        http.post(format!("{url}/v1/approvals/{id}")).json(&json!({"decision": "approve"}))
                    })
                    .await;
                if !matches!(answer.status, 200 | 404 | 409) {
                    self.trouble(format!("approval {id}: {} {}", answer.status, answer.body));
                }
            }
        }
    }
}

fn draw(draws: &mut StdRng) -> Kind {
    let all: u32 = KINDS.iter().map(|(_, weight)| weight).sum();
    let mut point = draws.random_range(0..all);
    for (kind, weight) in KINDS {
        if point < weight {
            return kind;
        }
        point -= weight;
    }
    Kind::Plain
}
