//! `skep bench neighbors`: how an agent is affected by others that take all they can get.
//!
//! Everything runs in this process, without HTTP and without inference. The hostile agent does one kind of
//! damage at a time, in several sessions, one turn after the other without a pause.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use skep_runtime::{AgentHost, RuntimeError, RuntimeOptions};
use tokio::task::JoinSet;

use super::{super::out, build_agent, percentile, sorted_us, stand};
use crate::catalog;
use crate::embedded::{HOSTILE, NOOP};

const VICTIM: &str = "bench-noop";
const ATTACKER: &str = "bench-hostile";
/// Commands for the hostile agent, with a name for each.
const DAMAGES: [(&str, &str); 6] = [
    ("spin", "endless loops"),
    ("grow", "allocation bombs"),
    ("recurse", "deep recursion"),
    ("log", "log floods"),
    ("state", "writes without end"),
    ("handles", "handle leaks"),
];
const LIMITS: &str = "[limits]\nmemory_mb = 64\ncpu_ms = 500\nhost_calls = 20000\n";

/// Measure how an agent is affected by hostile ones beside it
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench neighbors
  skep bench neighbors --turns 5000 --attackers 16 --json")]
pub struct Args {
    /// Number of turns to measure during each kind of damage
    #[arg(long, value_name = "N", default_value_t = 2_000, value_parser = clap::value_parser!(u32).range(100..=1_000_000))]
    turns: u32,
    /// Hostile sessions that run at the same time [default: twice the number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    attackers: Option<u32>,
    /// Model that the host loads, although no turn uses it
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    attackers: u32,
    alone: Latency,
    beside: Vec<Beside>,
}

/// Latency of a committed turn without inference.
#[derive(Debug, Serialize)]
struct Latency {
    p50_us: f64,
    p99_us: f64,
    max_us: f64,
}

#[derive(Debug, Serialize)]
struct Beside {
    damage: &'static str,
    #[serde(flatten)]
    latency: Latency,
    /// Number of hostile turns by the error code that they ended with.
    ended: BTreeMap<String, usize>,
}

/// Measures the turns of an agent beside each kind of hostile agent.
pub async fn run(args: Args) -> Result<()> {
    let (noop, hostile) = (build_agent(&NOOP)?, build_agent(&HOSTILE)?);
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let models = stand::models(&args.model)?;
    let host = stand::start(folder.path(), models, RuntimeOptions::default()).await?;
    stand::deploy(&host, &format!("name = \"{VICTIM}\""), &noop).await?;
    stand::deploy(&host, &format!("name = \"{ATTACKER}\"\n{LIMITS}"), &hostile).await?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let attackers = args.attackers.unwrap_or(2 * processors);

    victim(&host, args.turns / 10).await?;
    let alone = victim(&host, args.turns).await?;
    let mut beside = Vec::new();
    for (damage, name) in DAMAGES {
        let stop = Arc::new(AtomicBool::new(false));
        let mut attack = JoinSet::new();
        for index in 0..attackers {
            let (host, stop) = (host.clone(), stop.clone());
            attack.spawn(async move { attack_until(&host, &stop, damage, index).await });
        }
        let latency = victim(&host, args.turns).await;
        stop.store(true, Ordering::Relaxed);
        let mut ended = BTreeMap::new();
        for codes in attack.join_all().await {
            for code in codes? {
                *ended.entry(code).or_default() += 1;
            }
        }
        beside.push(Beside { damage: name, latency: latency?, ended });
    }
    let report = Report { attackers, alone, beside };
    if args.json { out::json(&report) } else { for_people(&report) }
}

/// Runs hostile turns until `stop` is set. A turn that succeeds did no damage, which is an error.
async fn attack_until(host: &AgentHost, stop: &AtomicBool, damage: &str, index: u32) -> Result<Vec<String>> {
    let session = format!("{damage}-{index}");
    let mut codes = Vec::new();
    while !stop.load(Ordering::Relaxed) {
        match stand::turn(host, ATTACKER, &session, damage).await {
            Ok(_) => bail!("the hostile agent was not stopped while it did {damage:?}"),
            Err(RuntimeError::LimitExceeded { limit, .. }) => codes.push(format!("limit {limit}")),
            Err(error) => codes.push(error.code().to_owned()),
        }
    }
    Ok(codes)
}

async fn victim(host: &AgentHost, turns: u32) -> Result<Latency> {
    let mut times = Vec::with_capacity(turns as usize);
    for _ in 0..turns {
        let started = Instant::now();
        stand::turn(host, VICTIM, "victim", "ping").await?;
        times.push(started.elapsed());
    }
    let us = sorted_us(times);
    Ok(Latency { p50_us: percentile(&us, 0.5), p99_us: percentile(&us, 0.99), max_us: percentile(&us, 1.0) })
}

fn for_people(report: &Report) -> Result<()> {
    let Report { attackers, alone, beside } = report;
    out::line("committed turns of an agent without inference, in µs")?;
    let row = |name: &str, latency: &Latency, ended: String| {
        let Latency { p50_us, p99_us, max_us } = latency;
        [name.to_owned(), format!("{p50_us:.0}"), format!("{p99_us:.0}"), format!("{max_us:.0}"), ended]
    };
    let mut rows = vec![row("none", alone, String::new())];
    for Beside { damage, latency, ended } in beside {
        let ended: Vec<String> = ended.iter().map(|(code, count)| format!("{count} {code}")).collect();
        rows.push(row(&format!("{attackers} × {damage}"), latency, ended.join(", ")));
    }
    out::table(["ATTACKERS", "P50", "P99", "MAX", "STOPPED BY"], &rows)
}
