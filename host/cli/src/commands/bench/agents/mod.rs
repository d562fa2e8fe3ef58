//! `skep bench agents`: a server under the load of tool-calling agents.

mod report;
mod sessions;
mod timeline;
mod workload;

use std::path::PathBuf;
use std::sync::Arc;

use anyhow::{Result, bail};
use serde::Serialize;
use skep_engine::{AheadStats, Timeline};

use super::target::{Target, TargetArgs};
use crate::commands::out;
use crate::config::SpeculationConfig;
use crate::progress::{Progress as _, Terminal};
use crate::server_options::ServerOptions;
pub(super) use report::RoundReport;
pub(super) use sessions::{Plan, run as drive};
use timeline::StepShares;

/// Tokens that the KV cache holds under the mixed workload, whose sessions hold about twice as many.
const MIX_KV_TOKENS: usize = 16_384;

/// Measure a server under the load of tool-calling agents
///
/// Sessions run side by side. Each is one conversation with the same long system prompt, which has tool
/// definitions. Each turn is a tool call that a JSON Schema constrains, then a free-text answer about its
/// result, both streamed. Rounds after the first have new sessions and find the system prompt in the cache.
/// Fails if a request failed or if a call violates its schema.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench agents
  skep bench agents --sessions 16 --concurrency 8 --json
  skep bench agents --mix                           different agents, slow tools, little memory
  skep bench agents --timeline trace.json           every step and request, for Perfetto
  skep bench agents --url http://127.0.0.1:8081/v1 --rounds 2      another server, the same work")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Drive a mixed workload: 32 sessions at once with eight different system prompts, tools that take 50 to 500 ms,
    /// and a KV cache for half of the tokens that the sessions hold
    #[arg(long)]
    mix: bool,
    /// Tokens that the KV cache holds [default: 32768; with --mix 16384]
    #[arg(long, value_name = "N", conflicts_with = "url")]
    kv_tokens: Option<usize>,
    /// Speculative decoding, and the source of its drafts [default: auto, as for `skep up`]
    #[arg(long, value_name = "HOW", conflicts_with = "url")]
    speculation: Option<SpeculationConfig>,
    /// Sessions per round
    #[arg(long, value_name = "N", default_value_t = 8, default_value_if("mix", "true", "32"), value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sessions: u32,
    /// Turns per session, with two requests each
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Sessions that run at the same time
    #[arg(long, value_name = "N", default_value_t = 4, default_value_if("mix", "true", "32"), value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Exact length of each free-text answer
    #[arg(long, value_name = "TOKENS", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..))]
    answer_tokens: u32,
    /// Do not send the server the session to which a request belongs
    #[arg(long)]
    no_affinity: bool,
    /// Rounds: the first one starts with the cold cache of a fresh host, the others find the system prompt in
    /// it
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// Write every step of the engine and every request to this file, as a trace that Perfetto opens
    #[arg(long, value_name = "FILE", conflicts_with = "url")]
    timeline: Option<PathBuf>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    target: String,
    sessions: u32,
    turns: u32,
    concurrency: u32,
    answer_tokens: u32,
    affinity: bool,
    mix: bool,
    rounds: Vec<RoundReport>,
    ahead: Option<Ahead>,
}

/// Steps that a device started before the tokens of the step before were known; `null` if none was.
#[derive(Debug, Serialize)]
struct Ahead {
    steps: u64,
    /// Steps of which only some rows were used, or that others had to wait for.
    partial_steps: u64,
    wasted_steps: u64,
    rows: u64,
    wasted_rows: u64,
}

/// Runs the rounds, and prints their results.
pub async fn run(args: Args) -> Result<()> {
    let timeline = args.timeline.is_some().then(Arc::<Timeline>::default);
    let mut options = ServerOptions::default();
    options.engine.timeline = timeline.clone();
    if let Some(speculation) = args.speculation {
        options.engine.speculation = speculation.into();
    }
    options.executor.kv_tokens = args.kv_tokens.or(args.mix.then_some(MIX_KV_TOKENS));
    let target = Arc::new(Target::start(&args.target, options).await?);
    let (mut rounds, mut exchanges, mut start) = (Vec::new(), Vec::new(), None);
    for round in 1..=args.rounds {
        let plan = Plan {
            round,
            sessions: args.sessions,
            turns: args.turns,
            concurrency: args.concurrency,
            answer_tokens: args.answer_tokens,
            affinity: !args.no_affinity,
            mix: args.mix,
        };
        let step = Terminal.begin(&format!("round {round} of {}", args.rounds), None);
        let outcome = drive(&target, plan, step).await?;
        let shares = timeline.as_ref().and_then(|timeline| {
            StepShares::of(&timeline.steps(), outcome.started, outcome.started + outcome.wall)
        });
        start.get_or_insert(outcome.started);
        let (report, of_round) = RoundReport::new(outcome, shares);
        rounds.push(report);
        exchanges.extend(of_round);
    }
    let report = Report {
        target: target.label.clone(),
        sessions: args.sessions,
        turns: args.turns,
        concurrency: args.concurrency,
        answer_tokens: args.answer_tokens,
        affinity: !args.no_affinity,
        mix: args.mix,
        rounds,
        ahead: target.stats().and_then(|stats| Ahead::of(stats.ahead)),
    };
    if let Some(target) = Arc::into_inner(target) {
        target.stop().await;
    }
    if let (Some(path), Some(timeline), Some(start)) = (&args.timeline, timeline, start) {
        timeline::write(path, start, &timeline.steps(), &exchanges)?;
    }
    if args.json {
        out::json(&report)?
    } else {
        for_people(&report)?
    }
    match report.rounds.iter().filter(|round| round.failed()).count() {
        0 => Ok(()),
        failed => bail!("{failed} of {} rounds had failures", report.rounds.len()),
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { target, sessions, turns, concurrency, .. } = report;
    let affinity = if report.affinity { "" } else { ", without affinity" };
    out::line(&format!("{target}: {sessions} sessions of {turns} turns, {concurrency} at a time{affinity}"))?;
    report.rounds.iter().zip(1..).try_for_each(|(round, number)| round.print(&format!("round {number}")))?;
    if let Some(Ahead { steps, partial_steps, wasted_steps, rows, wasted_rows }) = &report.ahead {
        out::line(&format!(
            "steps started ahead: {steps}, {wasted_steps} wasted and {partial_steps} used in part; {wasted_rows} of {rows} rows wasted"
        ))?;
    }
    Ok(())
}

impl Ahead {
    fn of(stats: AheadStats) -> Option<Self> {
        let AheadStats { steps, partial_steps, wasted_steps, rows, wasted_rows } = stats;
        (steps > 0).then_some(Self { steps, partial_steps, wasted_steps, rows, wasted_rows })
    }
}
