//! Streams that run at the same time, and the outcome of each.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;

use crate::client::{ChatAnswer, ChatReader};
use crate::commands::bench::target::Target;
use crate::progress::Step;

/// The load to hold.
#[derive(Debug, Clone)]
pub struct Plan {
    pub streams: u32,
    pub tokens: u32,
    pub cancel_share: f64,
    pub until: Instant,
}

/// Outcomes of streams. `started` is the sum of the four counts after it.
#[derive(Debug, Default, Serialize)]
pub struct Counts {
    pub started: u64,
    pub finished: u64,
    pub cancelled: u64,
    /// Refused with 429.
    pub refused: u64,
    /// None of these: an error, or not all of its tokens.
    pub lost: u64,
    /// Refused without `Retry-After`, or without an error in OpenAI's format.
    pub impolite: u64,
    pub tokens: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_fault: Option<String>,
}

enum StreamOutcome {
    Finished { tokens: u64 },
    Cancelled { pieces: u64 },
    Refused { politely: bool },
}

impl Counts {
    fn count(&mut self, outcome: Result<StreamOutcome>) {
        self.started += 1;
        match outcome {
            Ok(StreamOutcome::Finished { tokens }) => {
                self.finished += 1;
                self.tokens += tokens;
            }
            Ok(StreamOutcome::Cancelled { pieces }) => {
                self.cancelled += 1;
                self.tokens += pieces;
            }
            Ok(StreamOutcome::Refused { politely }) => {
                self.refused += 1;
                self.impolite += u64::from(!politely);
            }
            Err(error) => {
                self.lost += 1;
                self.first_fault.get_or_insert_with(|| format!("{error:#}"));
            }
        }
    }
}

/// Keeps streams running until the end of the plan, and then reads the last ones to their end.
pub async fn hold(target: &Arc<Target>, plan: Plan, step: &dyn Step) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut running = JoinSet::new();
    let mut begun = 0;
    let begin = |running: &mut JoinSet<Result<StreamOutcome>>, number: u64| {
        let cancel_after = rand::random_bool(plan.cancel_share).then(|| rand::random_range(0..plan.tokens));
        running.spawn(stream(target.clone(), number, plan.tokens, cancel_after));
    };
    for _ in 0..plan.streams {
        begin(&mut running, begun);
        begun += 1;
    }
    while let Some(ended) = running.join_next().await {
        counts.count(ended.context("a stream panicked")?);
        step.note(&format!(
            "{} finished, {} cancelled, {} lost",
            counts.finished, counts.cancelled, counts.lost
        ));
        // A server that only fails is not asked forever.
        if Instant::now() < plan.until && counts.lost < u64::from(plan.streams) {
            begin(&mut running, begun);
            begun += 1;
        }
    }
    Ok(counts)
}

/// Sends `requests` at once and reads every answer.
pub async fn burst(target: &Arc<Target>, requests: u32, tokens: u32) -> Result<Counts> {
    let mut counts = Counts::default();
    let mut running: JoinSet<Result<StreamOutcome>> =
        (0..requests).map(|number| stream(target.clone(), number.into(), tokens, None)).collect();
    while let Some(ended) = running.join_next().await {
        counts.count(ended.context("a request panicked")?);
    }
    Ok(counts)
}

/// Reads one stream to its end, or to the chunk after which it is dropped.
async fn stream(
    target: Arc<Target>,
    number: u64,
    tokens: u32,
    cancel_after: Option<u32>,
) -> Result<StreamOutcome> {
    let ask = format!("Tell me about the number {number}, and then about another one.");
    let body = json!({"model": target.model, "messages": [{"role": "user", "content": ask}], "max_tokens": tokens,
        "temperature": 1, "ignore_eos": true, "stream": true, "stream_options": {"include_usage": true}});
    let mut reader: Box<ChatReader> = match target.client.start(&body, None).await? {
        ChatAnswer::Stream(reader) => reader,
        ChatAnswer::Busy { retry_after_s, error } => {
            return Ok(StreamOutcome::Refused { politely: retry_after_s.is_some() && error.is_some() });
        }
    };
    let mut pieces = 0;
    while cancel_after.is_none_or(|after| pieces < u64::from(after)) {
        if reader.next().await?.is_none() {
            let usage = reader.usage().context("the server did not report its usage")?;
            anyhow::ensure!(
                usage.completion_tokens == u64::from(tokens),
                "a stream ended without an error after {} of {tokens} tokens",
                usage.completion_tokens
            );
            return Ok(StreamOutcome::Finished { tokens: usage.completion_tokens });
        }
        pieces += 1;
    }
    Ok(StreamOutcome::Cancelled { pieces })
}
