//! `skep bench agents`: a server under the load of tool-calling agents.

mod report;
mod sessions;
mod workload;

use std::sync::Arc;

use anyhow::{Result, bail};
use serde::Serialize;

use super::target::{Target, TargetArgs};
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};
use crate::server_options::ServerOptions;
pub(super) use report::RoundReport;
pub(super) use sessions::{Plan, run as drive};

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
  skep bench agents --url http://127.0.0.1:8081/v1 --rounds 2      another server, the same work")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Sessions per round
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    sessions: u32,
    /// Turns per session, with two requests each
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Sessions that run at the same time
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Exact length of each free-text answer
    #[arg(long, value_name = "TOKENS", default_value_t = 48, value_parser = clap::value_parser!(u32).range(1..))]
    answer_tokens: u32,
    /// Do not tell the server which session a request belongs to
    #[arg(long)]
    no_affinity: bool,
    /// Rounds: the first one starts with the cold cache of a fresh host, the others find the system prompt in
    /// it
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
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
    rounds: Vec<RoundReport>,
}

pub async fn run(args: Args) -> Result<()> {
    let target = Arc::new(Target::start(&args.target, ServerOptions::default()).await?);
    let mut rounds = Vec::new();
    for round in 1..=args.rounds {
        let plan = Plan {
            round,
            sessions: args.sessions,
            turns: args.turns,
            concurrency: args.concurrency,
            answer_tokens: args.answer_tokens,
            affinity: !args.no_affinity,
        };
        let step = Terminal.begin(&format!("round {round} of {}", args.rounds), None);
        rounds.push(RoundReport::new(drive(&target, plan, step).await?));
    }
    let report = Report {
        target: target.place.clone(),
        sessions: args.sessions,
        turns: args.turns,
        concurrency: args.concurrency,
        answer_tokens: args.answer_tokens,
        affinity: !args.no_affinity,
        rounds,
    };
    if let Some(target) = Arc::into_inner(target) {
        target.stop().await;
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
    report.rounds.iter().zip(1..).try_for_each(|(round, number)| round.print(&format!("round {number}")))
}
