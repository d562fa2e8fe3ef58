//! `skep bench interference`: how a long prompt, a full queue of batches, or a second model affects the time between
//! the tokens of other sequences.

mod queue;
mod second;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use skep_engine::{Engine, EngineOptions, GenerateRequest, Sampling, TokenEvent, TokenStream};
use skep_model::{DeviceChoice, ExecutorOptions, LoadedModel};
use tokio::task::JoinSet;

use super::percentile;
use crate::catalog;
use crate::commands::out;
use crate::device_flag::{DeviceFlag, kernel_folders, report_fallback};
use crate::progress::Terminal;

/// Tokens that each sequence decodes, unless the arguments say otherwise.
const GENERATED: usize = 128;
/// Tokens that each sequence has before the measurement starts.
const WARM_TOKENS: usize = 32;

/// Measure the time between tokens while a long prompt arrives, while batches run, or beside a busy model
///
/// Several sequences decode together, first alone, then while a long prompt is computed beside them. Times
/// are between the tokens of one sequence, as its caller gets them; with the prompt, from its arrival to its
/// first token. With --queue, rounds without batches alternate with rounds in which batches run in the
/// background. With --beside, another model computes requests on the same CPUs without a pause, once taking turns
/// with the first and once not.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench interference
  skep bench interference --prompt 2048 --decodes 8 --step-target-ms 20
  skep bench interference --queue 5
  skep bench interference --beside smollm2-135m --decodes 1")]
pub struct Args {
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Threads [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    device: DeviceFlag,
    /// Tokens of the long prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 4096, value_parser = clap::value_parser!(u32).range(1..))]
    prompt: u32,
    /// Number of sequences that decode
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u16).range(1..=64))]
    decodes: u16,
    /// Tokens that each sequence decodes while no prompt arrives [default: 128; with --beside 1000]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    generate: Option<u32>,
    /// Maximum time of a step in which a prompt is computed beside decodes [default: depends on the time of
    /// decodes]
    #[arg(long, value_name = "MS")]
    step_target_ms: Option<u64>,
    /// Measure with a full queue of batches instead of a long prompt, for this many rounds with and without
    /// one
    #[arg(long, value_name = "ROUNDS", conflicts_with = "prompt", value_parser = clap::value_parser!(u16).range(1..=100))]
    queue: Option<u16>,
    /// Measure beside this model, which is busy on the same CPUs, instead of with a long prompt
    #[arg(long, value_name = "NAME|PATH", conflicts_with_all = ["prompt", "queue"])]
    beside: Option<String>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    decodes: u16,
    prompt: u32,
    alone: Gaps,
    beside_the_prompt: Gaps,
    prompt_first_token_ms: f64,
}

/// Times between tokens.
#[derive(Debug, Serialize)]
struct Gaps {
    count: usize,
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    max_ms: f64,
}

impl Args {
    /// Returns the number of tokens that each sequence decodes.
    fn generated(&self, default: usize) -> usize {
        self.generate.map_or(default, |tokens| tokens as usize)
    }
}

/// Measures the sequences alone and beside what the flags choose.
pub async fn run(args: Args) -> Result<()> {
    if let Some(busy) = &args.beside {
        return second::run(&args, busy).await;
    }
    let engine = tokio::task::block_in_place(|| start_model(&args, &args.model, true))?;
    if let Some(rounds) = args.queue {
        return queue::run(&engine, &args, rounds).await;
    }
    let everything = args.prompt as usize + 1;
    if everything > engine.info().context_length {
        bail!(
            "a prompt of {} tokens does not fit the context of {}",
            args.prompt,
            engine.info().context_length
        );
    }
    let generate = args.generated(GENERATED);
    let alone = Decodes::start(&engine, args.decodes).await?;
    let began = Instant::now();
    alone.each_has(WARM_TOKENS + generate).await;
    let alone = alone.stop(began, Instant::now()).await?;

    let beside = Decodes::start(&engine, args.decodes).await?;
    let arrived = Instant::now();
    let mut long = engine.generate(request(&engine, 1000, args.prompt as usize, 1))?;
    first_token(&mut long).await?;
    let first_token_at = Instant::now();
    let beside = beside.stop(arrived, first_token_at).await?;
    let report = Report {
        model: engine.info().name.clone(),
        decodes: args.decodes,
        prompt: args.prompt,
        alone: Gaps::of(alone),
        beside_the_prompt: Gaps::of(beside),
        prompt_first_token_ms: ms(first_token_at - arrived),
    };
    if args.json { out::json(&report) } else { for_people(&report) }
}

fn start_model(args: &Args, model: &str, take_turns: bool) -> Result<Engine> {
    let model = catalog::resolve(model, &Terminal)?;
    let (device, kernels) = (DeviceChoice::Auto, kernel_folders()?);
    let threads = args.threads;
    let mut options = ExecutorOptions { device, kernels, threads, take_turns, ..ExecutorOptions::default() };
    args.device.apply(&mut options);
    let loaded = LoadedModel::open(&model.name, &model.path, options)
        .with_context(|| format!("cannot load {}", model.path.display()))?;
    report_fallback(&model.name, loaded.fallback.as_deref());
    let step_target = args.step_target_ms.map(Duration::from_millis);
    Ok(Engine::start(loaded, EngineOptions { step_target, ..EngineOptions::default() })?)
}

/// Sequences that decode until they are stopped.
struct Decodes {
    tasks: JoinSet<Result<Vec<Instant>>>,
    counts: Vec<Arc<AtomicUsize>>,
    stop: Arc<AtomicBool>,
}

impl Decodes {
    /// Starts the sequences and waits until all of them decode.
    async fn start(engine: &Engine, count: u16) -> Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let (mut tasks, mut counts) = (JoinSet::new(), Vec::new());
        for number in 0..usize::from(count) {
            let longest = engine.info().context_length - WARM_TOKENS;
            let stream = engine.generate(request(engine, number, WARM_TOKENS, longest))?;
            let tokens = Arc::new(AtomicUsize::new(0));
            counts.push(tokens.clone());
            tasks.spawn(times_of_tokens(stream, tokens, stop.clone()));
        }
        let decodes = Decodes { tasks, counts, stop };
        decodes.each_has(WARM_TOKENS).await;
        Ok(decodes)
    }

    async fn each_has(&self, tokens: usize) {
        while self.counts.iter().any(|count| count.load(Relaxed) < tokens) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Stops the sequences; returns the times between tokens in ms, for tokens that came from `from` to `to`.
    async fn stop(mut self, from: Instant, to: Instant) -> Result<Vec<f64>> {
        self.stop.store(true, Relaxed);
        let mut gaps = Vec::new();
        while let Some(ended) = self.tasks.join_next().await {
            let times = ended.context("a sequence panicked")??;
            let pairs = times.windows(2).filter(|pair| pair[1] >= from && pair[1] <= to);
            gaps.extend(pairs.map(|pair| ms(pair[1] - pair[0])));
        }
        Ok(gaps)
    }
}

impl Gaps {
    fn of(mut gaps: Vec<f64>) -> Self {
        gaps.sort_by(f64::total_cmp);
        let of = |share| percentile(&gaps, share);
        Gaps { count: gaps.len(), p50_ms: of(0.5), p90_ms: of(0.9), p99_ms: of(0.99), max_ms: of(1.0) }
    }

    fn for_people(&self, name: &str) -> Result<()> {
        let Gaps { count, p50_ms, p90_ms, p99_ms, max_ms } = self;
        out::line(&format!(
            "  {name:<16} p50 {p50_ms:.1} ms   p90 {p90_ms:.1} ms   p99 {p99_ms:.1} ms   longest {max_ms:.1} ms   ({count})"
        ))
    }
}

async fn times_of_tokens(
    mut stream: TokenStream,
    tokens: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
) -> Result<Vec<Instant>> {
    let mut times = Vec::new();
    while !stop.load(Relaxed) {
        match stream.next().await {
            Some(Ok(TokenEvent::Token(_))) => {
                times.push(Instant::now());
                tokens.fetch_add(1, Relaxed);
            }
            Some(Ok(TokenEvent::Finished(_))) | None => {
                bail!(
                    "a sequence reached the end of its context\n  hint: measure fewer tokens or a shorter prompt"
                )
            }
            Some(event) => drop(event?),
        }
    }
    Ok(times)
}

async fn first_token(stream: &mut TokenStream) -> Result<()> {
    while let Some(event) = stream.next().await {
        if let TokenEvent::Token(_) = event? {
            return Ok(());
        }
    }
    bail!("the long prompt got no token")
}

/// Returns a request whose prompt shares no page with the prompt of another number.
fn request(engine: &Engine, number: usize, tokens: usize, max_tokens: usize) -> GenerateRequest {
    let mixed = |position: usize| {
        (position as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(number as u64 * 7919) >> 20
    };
    let vocabulary = engine.info().vocabulary_size as u64;
    let mut request =
        GenerateRequest::new((0..tokens).map(|position| (mixed(position) % vocabulary) as u32).collect());
    request.sampling = Sampling { temperature: 0.0, ..Sampling::default() };
    request.max_tokens = Some(max_tokens);
    request.ignore_eos = true;
    request.affinity.session = Some(number.to_string());
    request
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1000.0
}

fn for_people(report: &Report) -> Result<()> {
    let Report { model, decodes, prompt, .. } = report;
    out::line(&format!("{model}: time between the tokens of {decodes} sequences"))?;
    report.alone.for_people("alone")?;
    report.beside_the_prompt.for_people("with a prompt")?;
    out::line(&format!(
        "  the prompt of {prompt} tokens got its first token after {:.0} ms",
        report.prompt_first_token_ms
    ))
}
