//! `skep bench crash`: kills a host (`kill -9`) again and again at random points under mixed load, and counts
//! outside of the host what is lost, doubled or reported as interrupted.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde::Serialize;

use super::percentile;
use super::storm::{Account, COLUMNS, Options, Storm};
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};

/// Maximum number of ticks between two kills. A tick is an answer to a client, or an effect outside the host.
const MAX_TICKS_BETWEEN_KILLS: u64 = 60;
/// Time without a tick after which something is stuck.
const STUCK: Duration = Duration::from_secs(120);
/// One in this many kills comes while the next host starts.
const KILLS_FOR_ONE_IN_THE_START: u32 = 8;

/// Kill a host again and again under mixed load, and count what is lost or doubled
///
/// Starts `skep up` in a separate process, on one data folder. Clients send messages, cancel some, disconnect
/// in the middle of others, queue batches, send events, and fork, export, import and delete sessions. Agents
/// make requests, call tools of another agent and of an MCP server, ask for approval, set alarms and emit
/// events for a webhook. The operator deploys and rolls back. A server in this process counts the effects.
/// Fails if anything was lost or doubled.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench crash --kills 100
  skep bench crash --kills 1000 --minutes 60 --seed 7 --json")]
pub struct Args {
    /// Number of times the host is killed
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    kills: u32,
    /// Stop after this many minutes, whatever the number of kills
    #[arg(long, value_name = "M", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=10_000))]
    minutes: u64,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    kills: u32,
    /// Kills of a host that was not ready yet, which are included in `kills`.
    kills_in_the_start: u32,
    wall_s: f64,
    effects: usize,
    lost: usize,
    doubled: usize,
    #[serde(flatten)]
    account: Account,
    /// From the start of the process until it accepts requests.
    ready_ms: Times,
    /// From the start of the process until the first message is answered.
    first_turn_ms: Times,
    /// Number of answers that no client should get and of errors in the host's log. `first_troubles` has the
    /// first of them.
    troubles: usize,
    first_troubles: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Times {
    p50: f64,
    p99: f64,
}

/// Kills the host again and again, and fails if something was lost or doubled.
pub async fn run(args: Args) -> Result<()> {
    let stage = args.options.prepare(false).await?;
    let report = kill_and_count(&args, &stage.storm, stage.seed).await;
    if !report.as_ref().is_ok_and(Report::is_well) {
        stage.keep();
    }
    let report = report?;
    if args.options.json {
        out::json(&report)?;
    } else {
        for_people(&report)?;
    }
    report.verdict()
}

async fn kill_and_count(args: &Args, storm: &std::sync::Arc<Storm>, seed: u64) -> Result<Report> {
    let mut draws = StdRng::seed_from_u64(seed);
    let mut life = storm.begin()?.ready().await?;
    storm.welcome(&life).await?;
    storm.set_up().await?;
    let step = Terminal.count(&format!("kills, with seed {seed}"), u64::from(args.kills));
    let clients = storm.load();
    let (began, limit) = (Instant::now(), Duration::from_secs(args.minutes * 60));
    let (mut ready, mut first_turn) = (Vec::new(), Vec::new());
    let (mut kills, mut kills_in_the_start) = (0, 0);
    let mut ticks = storm.outside.ticks.subscribe();
    while kills < args.kills && began.elapsed() < limit {
        let enough = *ticks.borrow() + draws.random_range(1..=MAX_TICKS_BETWEEN_KILLS);
        let happens = ticks.wait_for(|ticks| *ticks >= enough);
        if tokio::time::timeout(STUCK, happens).await.is_err() {
            bail!("nothing has happened for {} s after kill {kills} of seed {seed}", STUCK.as_secs());
        }
        tokio::time::sleep(Duration::from_micros(draws.random_range(0..20_000))).await;
        if life.has_ended() {
            bail!("the host exited by itself after kill {kills} of seed {seed}");
        }
        life.kill().await?;
        storm.farewell();
        kills += 1;
        let mut birth = storm.begin()?;
        while draws.random_ratio(1, KILLS_FOR_ONE_IN_THE_START) && kills < args.kills {
            let usual_ms = ready.last().map_or(500, |last: &Duration| last.as_millis() as u64).max(1);
            tokio::time::sleep(Duration::from_millis(draws.random_range(0..usual_ms))).await;
            birth.kill().await?;
            (kills, kills_in_the_start) = (kills + 1, kills_in_the_start + 1);
            birth = storm.begin()?;
        }
        life = birth.ready().await.with_context(|| format!("after kill {kills} of seed {seed}"))?;
        ready.push(life.ready);
        first_turn.push(life.ready + storm.welcome(&life).await?);
        step.advance_to(u64::from(kills));
    }
    step.finish(&kills.to_string());
    storm.settle(clients).await?;
    let account = storm.books.account(&storm.outside);
    let (troubles, first_troubles) = storm.troubles();
    let report = Report {
        seed,
        kills,
        kills_in_the_start,
        wall_s: began.elapsed().as_secs_f64(),
        effects: account.effects(),
        lost: account.lost(),
        doubled: account.doubled(),
        account,
        ready_ms: Times::of(ready),
        first_turn_ms: Times::of(first_turn),
        troubles,
        first_troubles,
    };
    life.kill().await?;
    Ok(report)
}

impl Times {
    fn of(times: Vec<Duration>) -> Self {
        let mut ms: Vec<f64> = times.iter().map(|time| time.as_secs_f64() * 1e3).collect();
        ms.sort_by(f64::total_cmp);
        Self { p50: percentile(&ms, 0.5), p99: percentile(&ms, 0.99) }
    }
}

impl Report {
    fn is_well(&self) -> bool {
        self.lost + self.doubled + self.troubles == 0
    }

    fn verdict(&self) -> Result<()> {
        let Self { lost, doubled, troubles, seed, .. } = self;
        if self.is_well() {
            return Ok(());
        }
        bail!("{lost} lost, {doubled} doubled, {troubles} other faults, with seed {seed}")
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { seed, kills, kills_in_the_start, wall_s, effects, lost, doubled, .. } = report;
    out::line(&format!(
        "{kills} kills in {wall_s:.0} s with seed {seed}, {kills_in_the_start} of them while a host started: {effects} \
         effects, {lost} lost, {doubled} doubled"
    ))?;
    out::table(COLUMNS, &report.account.rows())?;
    for (what, times) in [("ready", &report.ready_ms), ("first message answered", &report.first_turn_ms)] {
        out::line(&format!("  {what}: p50 {:.0} ms, p99 {:.0} ms after the start", times.p50, times.p99))?;
    }
    for (code, count) in &report.account.failures {
        out::line(&format!("  failed with {code}: {count}"))?;
    }
    for fault in report.account.faults.iter().chain(&report.first_troubles) {
        out::line(&format!("  {fault}"))?;
    }
    Ok(())
}
