//! `skep bench runtime`: the cost of a deployment, an instance, a turn and a session by themselves.
//!
//! Everything runs in this process, without HTTP and without inference, on a database in a temporary folder.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use skep_runtime::{AgentHost, RuntimeOptions};
use tokio::task::JoinSet;

use super::{super::out, build_agent, median, percentile, sorted_us, stand};
use crate::catalog;
use crate::embedded::NOOP;

const AGENT: &str = "bench-noop";
/// Numbers of instances that are alive at the same time.
const CROWDS: [usize; 3] = [1, 100, 1_000];
const ROUNDS_PER_CROWD: usize = 10;
const COLD_DEPLOYMENTS: usize = 5;
/// Sessions that stay in memory while the memory of the other ones is measured.
const FEW_SESSIONS: usize = 64;

/// Measure deployments, instances, turns and sessions of an agent that does no inference
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench runtime
  skep bench runtime --turns 50000 --sessions 20000 --json")]
pub struct Args {
    /// Number of turns of each kind to measure
    #[arg(long, value_name = "N", default_value_t = 20_000, value_parser = clap::value_parser!(u32).range(100..=10_000_000))]
    turns: u32,
    /// Number of sessions whose memory is measured
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u32).range(1_000..=1_000_000))]
    sessions: u32,
    /// Model that the host loads, although no turn uses it
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    component_bytes: usize,
    /// Time to compile, describe and store a component.
    cold_deploy_ms: f64,
    /// Time of a deployment whose compiled code was stored before.
    warm_deploy_ms: f64,
    instantiate: Vec<Instantiate>,
    /// The guest is called in a fresh instance, and nothing is stored.
    turn_without_commit: Turns,
    /// Includes the mailbox, events and the commit to the database.
    turn: Turns,
    memory: Option<Memory>,
}

#[derive(Debug, Serialize)]
struct Instantiate {
    concurrent: usize,
    p50_us: f64,
    p99_us: f64,
}

/// Times of turns one after the other, and the rate of several at the same time.
#[derive(Debug, Serialize)]
struct Turns {
    p50_us: f64,
    p99_us: f64,
    at_a_time: usize,
    turns_per_s: f64,
}

/// Growth of the process's resident memory for each item.
#[derive(Debug, Serialize)]
struct Memory {
    instance_bytes: f64,
    idle_session_bytes: f64,
    hibernated_session_bytes: f64,
}

/// Measures deployments, instances, turns and sessions, and prints their times and memory.
pub async fn run(args: Args) -> Result<()> {
    let component = build_agent(&NOOP)?;
    let models = stand::models(&args.model)?;
    let folder = tempfile::tempdir().context("cannot create a temporary folder")?;
    let start = async |name: &str, max_sessions_loaded: usize| {
        let options = RuntimeOptions {
            max_sessions_loaded,
            max_instances: CROWDS[CROWDS.len() - 1],
            ..RuntimeOptions::default()
        };
        stand::start(&folder.path().join(name), models.clone(), options).await
    };

    let mut cold_ms = Vec::new();
    for index in 0..COLD_DEPLOYMENTS {
        let host = start(&format!("cold-{index}"), FEW_SESSIONS).await?;
        cold_ms.push(deploy(&host, &component).await?);
    }
    let host = start("host", FEW_SESSIONS).await?;
    deploy(&host, &component).await?;
    let mut warm_ms = Vec::new();
    for _ in 0..COLD_DEPLOYMENTS {
        warm_ms.push(deploy(&host, &component).await?);
    }
    let mut instantiate = Vec::new();
    for concurrent in CROWDS {
        instantiate.push(measure_instances(&host, concurrent).await?);
    }
    let turn_without_commit = measure_turns(&host, args.turns, Kind::Rehearsed).await?;
    let turn = measure_turns(&host, args.turns, Kind::Committed).await?;
    let memory = match resident_bytes() {
        None => None,
        Some(_) => {
            let many = start("many", args.sessions as usize + FEW_SESSIONS).await?;
            deploy(&many, &component).await?;
            Some(Memory {
                // Uses slots that no instance had before.
                instance_bytes: memory_of_instances(&many).await?,
                hibernated_session_bytes: memory_of_sessions(&host, args.sessions).await?,
                idle_session_bytes: memory_of_sessions(&many, args.sessions).await?,
            })
        }
    };
    let report = Report {
        component_bytes: component.len(),
        cold_deploy_ms: median(&mut cold_ms),
        warm_deploy_ms: median(&mut warm_ms),
        instantiate,
        turn_without_commit,
        turn,
        memory,
    };
    if args.json { out::json(&report) } else { for_people(&report) }
}

async fn deploy(host: &AgentHost, component: &[u8]) -> Result<f64> {
    let started = Instant::now();
    stand::deploy(host, &format!("name = \"{AGENT}\""), component).await?;
    Ok(started.elapsed().as_secs_f64() * 1_000.0)
}

/// Measures instances in rounds; all instances of a round are alive when its last one is created.
async fn measure_instances(host: &AgentHost, concurrent: usize) -> Result<Instantiate> {
    let mut times = Vec::new();
    for round in 0..=ROUNDS_PER_CROWD * CROWDS[CROWDS.len() - 1] / concurrent {
        let mut making = JoinSet::new();
        for _ in 0..concurrent {
            let host = host.clone();
            making.spawn(async move {
                let started = Instant::now();
                let instance = host.instantiate(AGENT).await;
                (started.elapsed(), instance)
            });
        }
        for (time, instance) in making.join_all().await {
            instance?;
            // The first round warms up.
            if round > 0 {
                times.push(time);
            }
        }
    }
    let us = sorted_us(times);
    Ok(Instantiate { concurrent, p50_us: percentile(&us, 0.5), p99_us: percentile(&us, 0.99) })
}

#[derive(Clone, Copy)]
enum Kind {
    Rehearsed,
    Committed,
}

async fn measure_turns(host: &AgentHost, turns: u32, kind: Kind) -> Result<Turns> {
    turns_of(host, kind, "warm", turns / 10).await?;
    let us = sorted_us(turns_of(host, kind, "alone", turns).await?);
    let at_a_time = 2 * std::thread::available_parallelism().map_or(1, usize::from);
    let mut running = JoinSet::new();
    let started = Instant::now();
    for index in 0..at_a_time {
        let host = host.clone();
        let share = turns / at_a_time as u32;
        running.spawn(async move { turns_of(&host, kind, &format!("beside-{index}"), share).await });
    }
    let mut done = 0;
    for times in running.join_all().await {
        done += times?.len();
    }
    let turns_per_s = done as f64 / started.elapsed().as_secs_f64();
    Ok(Turns { p50_us: percentile(&us, 0.5), p99_us: percentile(&us, 0.99), at_a_time, turns_per_s })
}

async fn turns_of(host: &AgentHost, kind: Kind, session: &str, turns: u32) -> Result<Vec<Duration>> {
    let mut times = Vec::with_capacity(turns as usize);
    for _ in 0..turns {
        let started = Instant::now();
        let reply = match kind {
            Kind::Rehearsed => host.dry_run(AGENT, "ping").await?,
            Kind::Committed => turn(host, session).await?,
        };
        times.push(started.elapsed());
        ensure!(!reply.is_empty(), "the agent did not reply");
    }
    Ok(times)
}

async fn turn(host: &AgentHost, session: &str) -> Result<String> {
    Ok(stand::turn(host, AGENT, session, "ping").await?)
}

async fn memory_of_instances(host: &AgentHost) -> Result<f64> {
    let count = CROWDS[CROWDS.len() - 1] - 1;
    let before = resident_bytes().context("cannot read the resident memory")?;
    let mut held = Vec::with_capacity(count);
    for _ in 0..count {
        held.push(host.instantiate(AGENT).await?);
    }
    let after = resident_bytes().context("cannot read the resident memory")?;
    Ok((after - before) / count as f64)
}

/// Runs one turn in each of many new sessions; a tenth of them runs before the measurement, so that memory
/// that the process needs once is not counted.
async fn memory_of_sessions(host: &AgentHost, sessions: u32) -> Result<f64> {
    let warm = sessions / 10;
    for index in 0..warm {
        turn(host, &format!("warm-{index}")).await?;
    }
    let before = resident_bytes().context("cannot read the resident memory")?;
    for index in warm..sessions {
        turn(host, &format!("session-{index}")).await?;
    }
    let after = resident_bytes().context("cannot read the resident memory")?;
    Ok((after - before) / f64::from(sessions - warm))
}

/// Returns the resident memory of this process; `None` if the system does not report it in /proc.
fn resident_bytes() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kilobytes: f64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kilobytes * 1024.0)
}

fn for_people(report: &Report) -> Result<()> {
    let Report {
        component_bytes,
        cold_deploy_ms,
        warm_deploy_ms,
        instantiate,
        turn_without_commit,
        turn,
        memory,
    } = report;
    out::line(&format!("an agent without inference, with a component of {} KiB", component_bytes >> 10))?;
    out::line(&format!(
        "  deploy       cold {cold_deploy_ms:.1} ms   with stored code {warm_deploy_ms:.1} ms"
    ))?;
    for Instantiate { concurrent, p50_us, p99_us } in instantiate {
        out::line(&format!(
            "  instantiate  p50 {p50_us:.1} µs   p99 {p99_us:.1} µs   {concurrent} at a time"
        ))?;
    }
    for (name, turns) in [("not committed", turn_without_commit), ("committed", turn)] {
        let Turns { p50_us, p99_us, at_a_time, turns_per_s } = turns;
        out::line(&format!(
            "  turn         p50 {p50_us:.1} µs   p99 {p99_us:.1} µs   {turns_per_s:.0} per second with {at_a_time} at a time, \
             {name}"
        ))?;
    }
    let Some(Memory { instance_bytes, idle_session_bytes, hibernated_session_bytes }) = memory else {
        return Ok(());
    };
    out::line(&format!(
        "  memory       instance {:.1} KiB   idle session {:.2} KiB   hibernated session {:.2} KiB",
        instance_bytes / 1024.0,
        idle_session_bytes / 1024.0,
        hibernated_session_bytes / 1024.0
    ))
}
