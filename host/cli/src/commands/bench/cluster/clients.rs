//! The load: pairs of clients that write to one session, each through any host, in every way in which a message can be
//! sent. A client asks one host after the other, with the same idempotency key, until one has answered.

use std::sync::Arc;
use std::time::Instant;

use futures::future;
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use reqwest::Response;
use serde_json::Value;
use tokio::task::JoinSet;

use super::events::{End, Seen};
use super::history::{Message, Outcome};
use super::hosts::Address;
use super::world::{AGENT, ANSWER, Op, Order, PAUSE, World};

/// Clients that write to one session at the same time.
const WRITERS: usize = 2;
/// Messages of one client for one session; there are few, so that prompts stay short.
const MESSAGES: usize = 6;
/// Pairs for one client of batches.
const PAIRS_FOR_ONE_OF_BATCHES: usize = 4;
/// One in this many sessions also has alarms.
const SESSIONS_FOR_ONE_WITH_ALARMS: usize = 4;
/// Errors of turns that are stored, so that no later attempt has another end.
const FINAL: [&str; 5] = ["turn_lost", "cancelled", "agent_failed", "agent_trapped", "deadline_exceeded"];

/// The way in which a message is sent, with its relative frequency.
const WAYS: [(Way, u32); 5] =
    [(Way::Json, 4), (Way::Stream, 3), (Way::Detached, 2), (Way::Cancelled, 1), (Way::Plain, 1)];
const OPS: [(Op, u32); 5] = [(Op::Generate, 4), (Op::Emit, 2), (Op::Call, 2), (Op::Alarm, 2), (Op::Pay, 1)];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    /// The client waits for the whole answer.
    Json,
    /// The client reads events, and follows the turn at another host if the stream breaks.
    Stream,
    /// The client asks for the turn's state until it has ended.
    Detached,
    /// The client cancels the turn, and asks for its state until it has ended.
    Cancelled,
    /// Without an idempotency key: the message is sent once, and its outcome may stay unknown.
    Plain,
}

/// The answer of a committed turn.
struct Answer {
    turn: u64,
    place: u64,
    said: Option<String>,
    /// URL of the host that answered.
    host: String,
}

enum Attempt {
    Done(Answer),
    /// The turn failed, and a later attempt would have the same end.
    Failed,
    /// Another host may answer. Contains the reason.
    Again(String),
}

/// The message that a client has sent.
struct Turn<'a> {
    session: &'a str,
    id: &'a str,
    /// The moment at which the client gives up.
    until: Instant,
}

impl World {
    /// Starts pairs of clients, and clients of batches. Each one finishes once [`World::end`] was called.
    pub fn load(self: &Arc<Self>, pairs: usize, seed: u64) -> JoinSet<()> {
        let mut clients = JoinSet::new();
        let draws =
            |client: usize| StdRng::seed_from_u64(seed.wrapping_mul(1_000).wrapping_add(client as u64));
        for pair in 0..pairs {
            clients.spawn(Arc::clone(self).work(pair, draws(pair)));
        }
        for client in 0..pairs.div_ceil(PAIRS_FOR_ONE_OF_BATCHES) {
            clients.spawn(Arc::clone(self).queue_batches(client, draws(pairs + client)));
        }
        clients
    }

    async fn work(self: Arc<Self>, pair: usize, mut draws: StdRng) {
        for number in 1.. {
            let session = format!("{}-{pair}-{number}", self.run);
            let has_alarms = number % SESSIONS_FOR_ONE_WITH_ALARMS == 0;
            if has_alarms {
                self.ring_in(&session);
            }
            let writers = (0..WRITERS).map(|writer| {
                let draws = StdRng::seed_from_u64(draws.random());
                self.write(&session, writer, has_alarms, draws)
            });
            future::join_all(writers).await;
            self.takeovers.left(&session);
            if self.has_ended() {
                return;
            }
        }
    }

    async fn write(&self, session: &str, writer: usize, has_alarms: bool, mut draws: StdRng) {
        for number in 0..MESSAGES {
            if self.has_ended() {
                return;
            }
            let op = match draw(&OPS, &mut draws) {
                Op::Alarm if !has_alarms => Op::Generate,
                op => op,
            };
            let way = draw(&WAYS, &mut draws);
            self.send(session, &format!("{session}-{writer}-{number}"), op, way, &mut draws).await;
            if draws.random_ratio(1, 3)
                && let Some(address) = self.addresses.pick(draws.random())
            {
                self.read(&address, session).await;
            }
        }
    }

    /// Sends a message until a host has answered it, and records what came of it.
    async fn send(&self, session: &str, id: &str, op: Op, way: Way, draws: &mut StdRng) {
        let (sent, until) = (self.now(), Instant::now() + ANSWER);
        let turn = Turn { session, id, until };
        let attempt = loop {
            let why = match self.addresses.pick(draws.random()) {
                Some(address) => match self.attempt(&address, &turn, op, way, draws).await {
                    Attempt::Again(why) if way != Way::Plain => why,
                    attempt => break attempt,
                },
                None => "no host runs".to_owned(),
            };
            if Instant::now() > until {
                self.trouble(format!("{id} got no answer within {} s: {why}", ANSWER.as_secs()));
                break Attempt::Again(why);
            }
            tokio::time::sleep(PAUSE).await;
        };
        let (outcome, said) = match attempt {
            Attempt::Done(Answer { turn, place, said, host }) => {
                self.takeovers.acknowledged(session, &host);
                (Outcome::Acknowledged { at: self.now(), turn, place }, said)
            }
            Attempt::Failed => (Outcome::Failed, None),
            Attempt::Again(_) => (Outcome::Unknown, None),
        };
        let message = Message { session: session.to_owned(), id: id.to_owned(), sent, outcome };
        self.enter(Order { message, op, said });
    }

    async fn attempt(
        &self,
        address: &Address,
        turn: &Turn<'_>,
        op: Op,
        way: Way,
        draws: &mut StdRng,
    ) -> Attempt {
        let request = self.message(address, turn.session, turn.id, op);
        let keyed = |request: reqwest::RequestBuilder| request.header("idempotency-key", turn.id);
        let request = match way {
            Way::Json => keyed(request),
            Way::Stream => keyed(request).header("accept", "text/event-stream"),
            Way::Detached | Way::Cancelled => keyed(request).header("prefer", "respond-async"),
            Way::Plain => request,
        };
        let response = match request.send().await {
            Ok(response) => response,
            Err(error) => return Attempt::Again(error.to_string()),
        };
        match (response.status().as_u16(), way) {
            (200, Way::Stream) => self.follow(response, address, turn, draws).await,
            (200, _) => {
                let host = self.answering(&response, address);
                match response.json::<Value>().await {
                    Ok(body) => self.done(&body, turn, host),
                    Err(error) => Attempt::Again(error.to_string()),
                }
            }
            (202, _) => {
                let Ok(accepted) = response.json::<Value>().await else {
                    return Attempt::Again("the answer broke off".to_owned());
                };
                let Some(turn_id) = accepted["turn_id"].as_str() else {
                    return Attempt::Again(format!("the turn has no id: {accepted}"));
                };
                if way == Way::Cancelled {
                    tokio::time::sleep(PAUSE.mul_f64(draws.random())).await;
                    // If the request is lost, the turn ends by itself.
                    let _ = self.http.delete(self.turn_url(address, turn, turn_id)).send().await;
                }
                self.ended(turn, turn_id, draws).await
            }
            (status, _) => self.refused(status, response, turn).await,
        }
    }

    /// Returns the answer in the body of a committed turn.
    fn done(&self, body: &Value, turn: &Turn<'_>, host: String) -> Attempt {
        let data = &body["data"];
        match (body["turn"].as_u64(), data["entries"].as_u64()) {
            (Some(number), Some(place)) => {
                let said = data["outcome"].as_str().map(str::to_owned);
                Attempt::Done(Answer { turn: number, place, said, host })
            }
            _ => {
                self.trouble(format!("{} was answered with {body}", turn.id));
                Attempt::Again("the answer is not the agent's".to_owned())
            }
        }
    }

    /// Reads an error: most of them mean that another attempt, or another host, may succeed.
    async fn refused(&self, status: u16, response: Response, turn: &Turn<'_>) -> Attempt {
        let body: Value = response.json().await.unwrap_or_default();
        let code = body["error"]["code"].as_str().unwrap_or_default();
        if FINAL.contains(&code) {
            return Attempt::Failed;
        }
        if matches!(status, 400..=499) && !matches!(status, 404 | 408 | 409 | 425 | 429 | 499) {
            self.trouble(format!("{} was refused: {status} {body}", turn.id));
        }
        Attempt::Again(format!("{status} {code}"))
    }

    fn turn_url(&self, address: &Address, turn: &Turn<'_>, turn_id: &str) -> String {
        format!("{}/v1/agents/{AGENT}/sessions/{}/turns/{turn_id}", address.url, turn.session)
    }

    /// Asks one host after the other for a turn until it has ended.
    async fn ended(&self, turn: &Turn<'_>, turn_id: &str, draws: &mut StdRng) -> Attempt {
        let mut why = "no host runs".to_owned();
        while Instant::now() < turn.until {
            if let Some(address) = self.addresses.pick(draws.random()) {
                match self.http.get(self.turn_url(&address, turn, turn_id)).send().await {
                    Ok(response) if response.status().is_success() => {
                        let host = self.answering(&response, &address);
                        let body: Value = response.json().await.unwrap_or_default();
                        match body["state"].as_str() {
                            Some("done") => return self.done(&body, turn, host),
                            Some("failed") => return Attempt::Failed,
                            state => why = format!("the turn is {state:?}"),
                        }
                    }
                    Ok(response) => {
                        let status = response.status().as_u16();
                        let body: Value = response.json().await.unwrap_or_default();
                        if body["error"]["code"] == "turn_not_found" {
                            self.trouble(format!("{} was accepted, and its turn is gone", turn.id));
                            return Attempt::Again("the turn is gone".to_owned());
                        }
                        why = format!("{status} {}", body["error"]["code"]);
                    }
                    Err(error) => why = error.to_string(),
                }
            }
            tokio::time::sleep(PAUSE).await;
        }
        Attempt::Again(why)
    }

    /// Reads the events of a turn to its end, from one host after the other.
    async fn follow(
        &self,
        mut response: Response,
        address: &Address,
        turn: &Turn<'_>,
        draws: &mut StdRng,
    ) -> Attempt {
        let mut seen = Seen::default();
        let mut host = self.answering(&response, address);
        loop {
            while let Ok(Some(bytes)) = response.chunk().await {
                match seen.take(&bytes) {
                    Ok(None) => {}
                    Ok(Some(End::Done(body))) => return self.done(&body, turn, host),
                    Ok(Some(End::Failed(code))) if FINAL.contains(&code.as_str()) => return Attempt::Failed,
                    Ok(Some(End::Failed(code))) => return Attempt::Again(code),
                    Err(error) => {
                        self.trouble(format!("the events of {}: {error:#}", turn.id));
                        return Attempt::Again(error.to_string());
                    }
                }
            }
            let Some(turn_id) = seen.turn_id.clone() else {
                return Attempt::Again("the stream broke off before the turn had begun".to_owned());
            };
            seen.reconnect();
            response = loop {
                if Instant::now() > turn.until {
                    return Attempt::Again("the stream broke off".to_owned());
                }
                tokio::time::sleep(PAUSE).await;
                let Some(address) = self.addresses.pick(draws.random()) else { continue };
                let request = self.http.get(format!("{}/events", self.turn_url(&address, turn, &turn_id)));
                let request = match seen.last_id {
                    Some(last) => request.header("last-event-id", last),
                    None => request,
                };
                match request.send().await {
                    Ok(next) if next.status().as_u16() == 200 => {
                        host = self.answering(&next, &address);
                        break next;
                    }
                    // The last event was seen, and its connection broke before it was read.
                    Ok(next) if next.status().as_u16() == 204 => {
                        return self.ended(turn, &turn_id, draws).await;
                    }
                    _ => {}
                }
            };
        }
    }
}

fn draw<T: Copy>(choices: &[(T, u32)], draws: &mut StdRng) -> T {
    let all: u32 = choices.iter().map(|(_, weight)| weight).sum();
    let mut point = draws.random_range(0..all);
    for (choice, weight) in choices {
        if point < *weight {
            return *choice;
        }
        point -= weight;
    }
    choices[0].0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_is_drawn_as_often_as_its_weight_says() {
        let mut draws = StdRng::seed_from_u64(1);
        let drawn: Vec<Way> = (0..11_000).map(|_| draw(&WAYS, &mut draws)).collect();
        for (way, weight) in WAYS {
            let count = drawn.iter().filter(|drawn| **drawn == way).count();
            let wanted = weight as usize * 1_000;
            assert!(count.abs_diff(wanted) < 200, "{way:?}: {count} instead of {wanted}");
        }
    }
}
