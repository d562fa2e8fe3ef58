//! `skep bench interference --beside`: an interactive model and a busy one on the same CPUs.
//!
//! Rounds alternate: each model alone, both with turns, and both without, where only the operating system divides the
//! CPUs between them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::Instant;

use anyhow::{Context as _, Result};
use serde::Serialize;
use skep_engine::{Engine, TokenEvent};
use tokio::task::JoinSet;

use super::{Args, Decodes, Gaps, WARM_TOKENS, request, start_model};
use crate::commands::out;

const ROUNDS: u32 = 3;
/// Number of tokens that are decoded in each setting, so that the busy model finishes many requests.
const GENERATED: usize = 1000;
/// The requests of the busy model: this many at a time, each with a prompt and an answer of these lengths.
const REQUESTS: usize = 4;
const PROMPT_TOKENS: usize = 512;
const ANSWER_TOKENS: usize = 64;

#[derive(Debug, Serialize)]
struct Report {
    interactive: String,
    busy: String,
    decodes: u16,
    alone: Gaps,
    with_turns: Gaps,
    without_turns: Gaps,
    busy_alone_tok_per_s: f64,
    busy_with_turns_tok_per_s: f64,
    busy_without_turns_tok_per_s: f64,
}

/// Measurements of one setting, over all rounds.
#[derive(Default)]
struct Measured {
    gaps: Vec<f64>,
    tokens: usize,
    seconds: f64,
}

/// The two models, loaded alike.
struct Pair {
    interactive: Engine,
    busy: Engine,
}

impl Pair {
    fn load(args: &Args, busy: &str, take_turns: bool) -> Result<Self> {
        Ok(Pair {
            interactive: start_model(args, &args.model, take_turns)?,
            busy: start_model(args, busy, take_turns)?,
        })
    }

    async fn measure(&self, args: &Args, into: &mut Measured) -> Result<()> {
        let work = Work::begin(&self.busy);
        // The busy model computes prompts and answers before anything is measured.
        work.has_computed(PROMPT_TOKENS * REQUESTS).await;
        let decodes = Decodes::start(&self.interactive, args.decodes).await?;
        let (began, before) = (Instant::now(), work.tokens.load(Relaxed));
        decodes.each_has(WARM_TOKENS + args.generated(GENERATED)).await;
        into.tokens += work.tokens.load(Relaxed) - before;
        into.seconds += began.elapsed().as_secs_f64();
        into.gaps.extend(decodes.stop(began, Instant::now()).await?);
        work.end().await
    }
}

/// Measures the interactive model alone and beside the busy one.
pub(super) async fn run(args: &Args, busy: &str) -> Result<()> {
    let load = |take_turns| tokio::task::block_in_place(|| Pair::load(args, busy, take_turns));
    let (turns, no_turns) = (load(true)?, load(false)?);
    let mut alone = Measured::default();
    let (mut with, mut without) = (Measured::default(), Measured::default());
    for _ in 0..ROUNDS {
        let decodes = Decodes::start(&turns.interactive, args.decodes).await?;
        let began = Instant::now();
        decodes.each_has(WARM_TOKENS + args.generated(GENERATED)).await;
        let took = began.elapsed();
        alone.gaps.extend(decodes.stop(began, Instant::now()).await?);
        let work = Work::begin(&turns.busy);
        work.has_computed(PROMPT_TOKENS * REQUESTS).await;
        let (began, before) = (Instant::now(), work.tokens.load(Relaxed));
        tokio::time::sleep(took).await;
        alone.tokens += work.tokens.load(Relaxed) - before;
        alone.seconds += began.elapsed().as_secs_f64();
        work.end().await?;
        turns.measure(args, &mut with).await?;
        no_turns.measure(args, &mut without).await?;
    }
    let rate = |measured: &Measured| measured.tokens as f64 / measured.seconds;
    let report = Report {
        interactive: turns.interactive.info().name.clone(),
        busy: turns.busy.info().name.clone(),
        decodes: args.decodes,
        busy_alone_tok_per_s: rate(&alone),
        busy_with_turns_tok_per_s: rate(&with),
        busy_without_turns_tok_per_s: rate(&without),
        alone: Gaps::of(alone.gaps),
        with_turns: Gaps::of(with.gaps),
        without_turns: Gaps::of(without.gaps),
    };
    if args.json { out::json(&report) } else { for_people(&report) }
}

/// Requests that keep a model busy until they are ended.
struct Work {
    tasks: JoinSet<Result<()>>,
    /// Tokens computed so far, in prompts and answers.
    tokens: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Work {
    fn begin(engine: &Engine) -> Self {
        let (tokens, stop) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicBool::new(false)));
        let mut tasks = JoinSet::new();
        for number in 0..REQUESTS {
            tasks.spawn(keep_busy(engine.clone(), number, tokens.clone(), stop.clone()));
        }
        Work { tasks, tokens, stop }
    }

    async fn has_computed(&self, tokens: usize) {
        while self.tokens.load(Relaxed) < tokens {
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
        }
    }

    async fn end(mut self) -> Result<()> {
        self.stop.store(true, Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.context("a request of the busy model panicked")??;
        }
        Ok(())
    }
}

async fn keep_busy(
    engine: Engine,
    number: usize,
    tokens: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) -> Result<()> {
    // A prompt that no other request has.
    for round in (2..).take_while(|_| !stop.load(Relaxed)) {
        let unique = 10_000 * round + number;
        let mut stream = engine.generate(request(&engine, unique, PROMPT_TOKENS, ANSWER_TOKENS))?;
        let mut is_first = true;
        while let Some(event) = stream.next().await {
            if let TokenEvent::Token(_) = event? {
                tokens.fetch_add(1 + if is_first { PROMPT_TOKENS } else { 0 }, Relaxed);
                is_first = false;
            }
        }
    }
    Ok(())
}

fn for_people(report: &Report) -> Result<()> {
    let Report { interactive, busy, decodes, alone, with_turns, without_turns, .. } = report;
    out::line(&format!(
        "{interactive}: time between the tokens of {decodes} sequences, while {busy} computes {REQUESTS} requests of \
         {PROMPT_TOKENS} + {ANSWER_TOKENS} tokens at a time"
    ))?;
    for (name, gaps, rate) in [
        ("alone", alone, report.busy_alone_tok_per_s),
        ("with turns", with_turns, report.busy_with_turns_tok_per_s),
        ("without turns", without_turns, report.busy_without_turns_tok_per_s),
    ] {
        gaps.for_people(name)?;
        out::line(&format!("  {:<16} {busy} computes {rate:.0} tok/s", ""))?;
    }
    let slower = |gaps: &Gaps| gaps.p50_ms / alone.p50_ms;
    out::line(&format!(
        "  a fair half of the CPUs is 2.0 × the time alone: with turns {:.1} ×, without {:.1} × (p50)",
        slower(with_turns),
        slower(without_turns)
    ))
}
