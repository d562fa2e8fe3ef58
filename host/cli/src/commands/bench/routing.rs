//! `skep bench routing`: the benefit of keeping a session on its replica.

use std::num::NonZeroUsize;
use std::sync::Arc;

use anyhow::Result;
use serde::Serialize;
use skep_engine::{EngineOptions, Routing};

use super::agents::{Plan, RoundReport, drive};
use super::target::{Target, TargetArgs};
use crate::commands::out;
use crate::device_flag::DeviceFlag;
use crate::progress::{Progress as _, Terminal};
use crate::server_options::ServerOptions;

/// Measure several replicas with and without affinity
///
/// Runs the load of `skep bench agents` on a fresh host, once for each way of routing.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench routing
  skep bench routing --replicas 4 --sessions 32 --concurrency 8 --json")]
pub struct Args {
    /// Engines of the model; the threads are divided among them
    #[arg(long, value_name = "N", default_value = "2")]
    replicas: NonZeroUsize,
    /// Model: a name, hf:OWNER/REPO[:FILE], or a path [default: smollm2-135m]
    #[arg(long, value_name = "NAME|PATH")]
    model: Option<String>,
    /// Threads for all replicas together [default: physical cores]
    #[arg(long, value_name = "N")]
    threads: Option<usize>,
    #[command(flatten)]
    device: DeviceFlag,
    /// Number of sessions
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
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    replicas: NonZeroUsize,
    affinity: RoundReport,
    round_robin: RoundReport,
}

/// Measures both ways of routing, and prints them side by side.
pub async fn run(args: Args) -> Result<()> {
    let report = Report {
        replicas: args.replicas,
        affinity: measure(&args, Routing::Affinity, "with affinity").await?,
        round_robin: measure(&args, Routing::RoundRobin, "round robin").await?,
    };
    if args.json {
        return out::json(&report);
    }
    let Args { replicas, sessions, turns, concurrency, .. } = &args;
    out::line(&format!(
        "{replicas} replicas: {sessions} sessions of {turns} turns, {concurrency} at a time"
    ))?;
    report.affinity.print("with affinity")?;
    report.round_robin.print("round robin")
}

async fn measure(args: &Args, routing: Routing, name: &str) -> Result<RoundReport> {
    let options = ServerOptions {
        replicas: args.replicas,
        engine: EngineOptions { routing, ..EngineOptions::default() },
        ..ServerOptions::default()
    };
    let target =
        TargetArgs { url: None, model: args.model.clone(), threads: args.threads, device: args.device };
    let target = Arc::new(Target::start(&target, options).await?);
    let plan = Plan {
        round: 1,
        sessions: args.sessions,
        turns: args.turns,
        concurrency: args.concurrency,
        answer_tokens: args.answer_tokens,
        affinity: true,
        mix: false,
    };
    let outcome = drive(&target, plan, Terminal.begin(name, None)).await?;
    if let Some(target) = Arc::into_inner(target) {
        target.stop().await;
    }
    Ok(RoundReport::new(outcome, None).0)
}
