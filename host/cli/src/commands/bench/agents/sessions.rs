//! Sessions that run side by side, each of which is one conversation that grows turn by turn.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::workload::{self, MAX_CALL_TOKENS};
use crate::client::{ChatAnswer, ChatUsage};
use crate::commands::bench::target::Target;
use crate::failure::Unreachable;
use crate::progress::Step;

/// The shape of one round.
#[derive(Debug, Clone)]
pub struct Plan {
    pub round: u32,
    pub sessions: u32,
    pub turns: u32,
    pub concurrency: u32,
    pub answer_tokens: u32,
    pub affinity: bool,
    /// Whether sessions have different system prompts, and tools take time.
    pub mix: bool,
}

/// One request and its answer.
pub struct Exchange {
    /// Number of the worker that sent it, from 0.
    pub worker: u32,
    /// The kind of the request: `call` or `answer`.
    pub kind: &'static str,
    pub asked: Instant,
    pub ended: Instant,
    pub first_token: Duration,
    /// Times between chunks of text, for free-text answers only: the forced tokens of a call arrive all at
    /// once.
    pub gaps: Vec<Duration>,
    pub usage: ChatUsage,
    /// The text of a call that its schema does not allow.
    pub violation: Option<String>,
}

/// Everything that a round produced.
pub struct Outcome {
    pub started: Instant,
    pub wall: Duration,
    pub exchanges: Vec<Exchange>,
    /// Errors of sessions that broke off. The other sessions continue, but no new one starts.
    pub failures: Vec<String>,
}

/// State that the sessions of a round share.
struct Round {
    target: Arc<Target>,
    plan: Plan,
    step: Box<dyn Step>,
    next_session: AtomicU32,
    requests_done: AtomicU32,
    tokens_done: AtomicU64,
    failed: AtomicU32,
    started: Instant,
}

/// Runs one round until it finishes.
pub async fn run(target: &Arc<Target>, plan: Plan, step: Box<dyn Step>) -> Result<Outcome> {
    let workers = plan.concurrency.min(plan.sessions);
    let round = Arc::new(Round {
        target: target.clone(),
        plan,
        step,
        next_session: AtomicU32::new(0),
        requests_done: AtomicU32::new(0),
        tokens_done: AtomicU64::new(0),
        failed: AtomicU32::new(0),
        started: Instant::now(),
    });
    let mut running: JoinSet<Result<(Vec<Exchange>, Vec<String>)>> =
        (0..workers).map(|worker| round.clone().work(worker)).collect();
    let (mut exchanges, mut failures) = (Vec::new(), Vec::new());
    while let Some(ended) = running.join_next().await {
        let (mine, failed) = ended.context("a session panicked")??;
        exchanges.extend(mine);
        failures.extend(failed);
    }
    let wall = round.started.elapsed();
    let Some(round) = Arc::into_inner(round) else { bail!("a session outlived its round") };
    let started = round.started;
    round.step.finish(&format!("{} requests", exchanges.len()));
    Ok(Outcome { started, wall, exchanges, failures })
}

impl Round {
    /// Runs one session after the other. A server that cannot be reached is an error, not a failed session.
    async fn work(self: Arc<Self>, worker: u32) -> Result<(Vec<Exchange>, Vec<String>)> {
        let (mut exchanges, mut failures) = (Vec::new(), Vec::new());
        while self.failed.load(Relaxed) == 0 {
            let session = self.next_session.fetch_add(1, Relaxed);
            if session >= self.plan.sessions {
                break;
            }
            match self.session(worker, session, &mut exchanges).await {
                Ok(()) => {}
                Err(error) if error.is::<Unreachable>() => return Err(error),
                Err(error) => {
                    self.failed.fetch_add(1, Relaxed);
                    failures.push(format!("session {session}: {error:#}"));
                }
            }
        }
        Ok((exchanges, failures))
    }

    async fn session(&self, worker: u32, session: u32, exchanges: &mut Vec<Exchange>) -> Result<()> {
        let Plan { round, turns, answer_tokens, mix, .. } = self.plan;
        let desk = mix.then(|| workload::DESKS[session as usize % workload::DESKS.len()]);
        let id = format!("bench-{round}-{session}");
        let mut messages = vec![message("system", &workload::system_prompt(desk))];
        for turn in 0..turns {
            let task = workload::task(session, turn);
            // The number makes sessions different, so that they share only the system prompt.
            let ask = format!("(visitor {round}-{session}, question {}) {}", turn + 1, task.ask);
            messages.push(message("user", &ask));
            let call = json!({"max_tokens": MAX_CALL_TOKENS, "response_format": workload::response_format(task.tool)});
            let (mut exchange, text) = self.exchange(&id, &messages, call).await?;
            exchange.gaps.clear();
            (exchange.worker, exchange.kind) = (worker, "call");
            exchange.violation = (!workload::is_call_of(task.tool, &text)).then(|| text.clone());
            exchanges.push(exchange);
            messages.push(message("assistant", &text));

            if mix {
                tokio::time::sleep(workload::tool_time(session, turn)).await;
            }
            messages.push(message("user", &format!("The tool says: {}", task.result)));
            let answer = json!({"max_tokens": answer_tokens, "ignore_eos": true});
            let (mut exchange, text) = self.exchange(&id, &messages, answer).await?;
            exchange.worker = worker;
            exchanges.push(exchange);
            messages.push(message("assistant", &text));
        }
        Ok(())
    }

    /// Sends one request and reads its whole answer.
    async fn exchange(&self, session: &str, messages: &[Value], extra: Value) -> Result<(Exchange, String)> {
        let mut body = json!({"model": self.target.model, "messages": messages, "temperature": 0, "stream": true,
            "stream_options": {"include_usage": true}});
        if let (Some(body), Value::Object(extra)) = (body.as_object_mut(), extra) {
            body.extend(extra);
        }
        let asked = Instant::now();
        let session = self.plan.affinity.then_some(session);
        let mut reader = match self.target.client.start(&body, session).await? {
            ChatAnswer::Stream(reader) => reader,
            ChatAnswer::Busy { error, .. } => {
                let message = error.map_or_else(|| "it is busy".to_owned(), |error| error.message);
                bail!("the server refused the request with 429: {message}");
            }
        };
        let mut text = String::new();
        let (mut first_token, mut last, mut gaps) = (None, asked, Vec::new());
        while let Some(piece) = reader.next().await? {
            let now = Instant::now();
            match first_token {
                None => first_token = Some(now - asked),
                Some(_) => gaps.push(now - last),
            }
            last = now;
            text.push_str(&piece);
        }
        let usage = reader.usage().cloned().context("the server did not report its usage")?;
        let tokens = self.tokens_done.fetch_add(usage.completion_tokens, Relaxed) + usage.completion_tokens;
        let done = self.requests_done.fetch_add(1, Relaxed) + 1;
        let all = self.plan.sessions * self.plan.turns * 2;
        let rate = tokens as f64 / self.started.elapsed().as_secs_f64();
        self.step.note(&format!("{done} of {all} requests, {rate:.0} tok/s"));
        let first_token = first_token.unwrap_or_else(|| asked.elapsed());
        let (worker, kind, ended) = (0, "answer", Instant::now());
        Ok((Exchange { worker, kind, asked, ended, first_token, gaps, usage, violation: None }, text))
    }
}

fn message(role: &str, content: &str) -> Value {
    json!({"role": role, "content": content})
}
