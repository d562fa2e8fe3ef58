//! `skep bench interference --queue`: interactive sequences beside a queue that never runs empty.

use std::time::Instant;

use anyhow::{Result, bail};
use serde::Serialize;
use skep_engine::{
    Engine, ModelSet,
    chat::{ChatMessage, ChatOptions},
};
use skep_runtime::{
    AgentHost, BatchItem, BatchPhase, BatchRequest, BatchTerms, HostParts, NewBatch, RuntimeOptions,
};
use skep_store::Store;

use super::{Args, Decodes, GENERATED, Gaps, WARM_TOKENS};
use crate::commands::out;

const PRINCIPAL: &str = "local";
/// More items than can be answered while a round is measured.
const ITEMS: usize = 4_000;
const ANSWER_TOKENS: usize = 64;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    decodes: u16,
    rounds: u16,
    empty_queue: Gaps,
    full_queue: Gaps,
    /// Ratio of the value with a full queue to the value with an empty one.
    p99_ratio: f64,
    p50_ratio: f64,
    queued_answers: u64,
    queued_answers_per_s: f64,
}

/// Measures the sequences in rounds with an empty queue and in rounds with a full one.
pub(super) async fn run(engine: &Engine, args: &Args, rounds: u16) -> Result<()> {
    let parts = HostParts::new(Store::in_memory().await?, ModelSet::new(engine.clone()));
    let host = AgentHost::start(parts, RuntimeOptions::default()).await?;
    let (mut empty, mut full) = (Vec::new(), Vec::new());
    let (mut answers, mut seconds) = (0, 0.0);
    for round in 0..rounds {
        empty.extend(measure(engine, args).await?);
        let batch = NewBatch {
            principal: PRINCIPAL.to_owned(),
            key: None,
            model: engine.info().name.clone(),
            items: (0..ITEMS).map(|number| item(usize::from(round) * ITEMS + number)).collect(),
            terms: BatchTerms::default(),
        };
        let id = host.queue_batch(batch).await?.id;
        // The queue already runs at full speed when the interactive sequences start.
        while host.batch(PRINCIPAL, &id).await?.items.done == 0 {
            tokio::task::yield_now().await;
        }
        let before = host.batch(PRINCIPAL, &id).await?.items.done;
        let began = Instant::now();
        full.extend(measure(engine, args).await?);
        seconds += began.elapsed().as_secs_f64();
        let after = host.batch(PRINCIPAL, &id).await?;
        if after.phase != BatchPhase::Running {
            bail!(
                "the queue ran empty during the measurement\n  hint: generate fewer tokens with --generate"
            );
        }
        answers += after.items.done - before;
        host.cancel_batch(PRINCIPAL, &id).await?;
        while engine.stats().running > 0 {
            tokio::task::yield_now().await;
        }
    }
    let (empty, full) = (Gaps::of(empty), Gaps::of(full));
    let report = Report {
        model: engine.info().name.clone(),
        decodes: args.decodes,
        rounds,
        p99_ratio: full.p99_ms / empty.p99_ms,
        p50_ratio: full.p50_ms / empty.p50_ms,
        empty_queue: empty,
        full_queue: full,
        queued_answers: answers,
        queued_answers_per_s: answers as f64 / seconds,
    };
    if args.json { out::json(&report) } else { for_people(&report) }
}

async fn measure(engine: &Engine, args: &Args) -> Result<Vec<f64>> {
    let decodes = Decodes::start(engine, args.decodes).await?;
    let began = Instant::now();
    decodes.each_has(WARM_TOKENS + args.generated(GENERATED)).await;
    decodes.stop(began, Instant::now()).await
}

fn item(number: usize) -> BatchItem {
    let text = format!("Question {number}: what would you tell a visitor about the number {number}?");
    let options = ChatOptions { max_tokens: Some(ANSWER_TOKENS), ignore_eos: true, ..ChatOptions::default() };
    let request = BatchRequest::Chat {
        messages: vec![ChatMessage::user(text)],
        options: Box::new(options),
        choices: 1,
    };
    BatchItem { request, form: String::new(), reference: None, keep: None }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { model, decodes, rounds, p99_ratio, p50_ratio, queued_answers_per_s, .. } = report;
    out::line(&format!("{model}: time between the tokens of {decodes} sequences, {rounds} rounds"))?;
    report.empty_queue.for_people("empty queue")?;
    report.full_queue.for_people("full queue")?;
    out::line(&format!("  full / empty     p50 {p50_ratio:.2}   p99 {p99_ratio:.2}"))?;
    out::line(&format!(
        "  answers of {ANSWER_TOKENS} tokens from the full queue: {queued_answers_per_s:.1}/s"
    ))
}
