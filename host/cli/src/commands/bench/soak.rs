//! `skep bench soak`: mixed load for a long time, with a comparison of what the host holds at the end and at
//! the start.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;
use skep_store::{Durability, Store, TableRows};

use super::storm::{Account, Options, Storm, metric};
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};

/// Growth that is allowed until the end: this share, plus this amount.
const MORE_MEMORY: (f64, f64) = (0.15, 32.0);
const MORE_FILES: (f64, f64) = (0.0, 24.0);
const MORE_ROWS: (f64, f64) = (0.1, 40.0);
/// Time after which everything that clients and connections leave behind is released.
const REST: Duration = Duration::from_secs(10);
/// Tables whose rows are kept for a time on purpose: ids of events for a day, finished turns for a day,
/// versions, batches for a day, log lines. They are shown but not judged.
const KEPT: [&str; 11] = [
    "events",
    "token_use",
    "usage",
    "deployments",
    "components",
    "turns",
    "turn_records",
    "batches",
    "batch_items",
    "logs",
    "sqlite_sequence",
];

/// Keep a host under mixed load, and compare what it uses at the end with what it used at the start
///
/// The load is that of `skep bench crash`, but the host is not killed: clients cancel, disconnect and delete
/// all their sessions; agents are deployed and rolled back. Fails if memory, open files, rows or KV pages in
/// use have grown, or if anything was lost or doubled.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench soak --minutes 30
  skep bench soak --minutes 480 --workers 32 --json")]
pub struct Args {
    /// Duration of the load; a warm-up of a fifth of it, at most three minutes, comes before
    #[arg(long, value_name = "M", default_value_t = 30, value_parser = clap::value_parser!(u64).range(1..=100_000))]
    minutes: u64,
    #[command(flatten)]
    options: Options,
}

#[derive(Debug, Serialize)]
struct Report {
    seed: u64,
    wall_s: f64,
    orders: usize,
    lost: usize,
    doubled: usize,
    #[serde(flatten)]
    account: Account,
    figures: Vec<Figure>,
    troubles: usize,
    first_troubles: Vec<String>,
}

/// One of the things that a host holds.
#[derive(Debug, Serialize)]
struct Figure {
    what: String,
    start: f64,
    end: f64,
    /// Maximum at the end; `None` means that it is shown but not judged.
    most: Option<f64>,
}

impl Figure {
    fn has_grown(&self) -> bool {
        self.most.is_some_and(|most| self.end > most)
    }
}

/// Runs the load, and fails if the host holds more at the end than at the start.
pub async fn run(args: Args) -> Result<()> {
    let stage = args.options.prepare(true).await?;
    let report = soak(&args, &stage.storm, stage.seed).await;
    if !report.as_ref().is_ok_and(|report| report.verdict().is_ok()) {
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

async fn soak(args: &Args, storm: &Arc<Storm>, seed: u64) -> Result<Report> {
    let mut life = storm.begin()?.ready().await?;
    storm.welcome(&life).await?;
    storm.set_up().await?;
    let process = life.id().context("the host has no process")?;
    let whole = Duration::from_secs(args.minutes * 60);
    let warm_up = (whole / 5).min(Duration::from_secs(180));
    hold(storm, warm_up, "warming up").await?;
    let start = held(storm, process).await?;
    let began = Instant::now();
    hold(storm, whole, "load").await?;
    let end = held(storm, process).await?;
    if life.has_ended() {
        bail!("the host exited by itself");
    }
    let account = storm.books.account(&storm.outside);
    let (troubles, first_troubles) = storm.troubles();
    let report = Report {
        seed,
        wall_s: began.elapsed().as_secs_f64(),
        orders: account.kinds.values().map(|sum| sum.orders).sum(),
        lost: account.lost(),
        doubled: account.doubled(),
        account,
        figures: compare(&start, &end),
        troubles,
        first_troubles,
    };
    life.kill().await?;
    Ok(report)
}

async fn hold(storm: &Arc<Storm>, time: Duration, what: &str) -> Result<()> {
    let step = Terminal.count(what, time.as_secs());
    let clients = storm.load();
    let began = Instant::now();
    while began.elapsed() < time {
        tokio::time::sleep(Duration::from_secs(1)).await;
        step.advance_to(began.elapsed().as_secs());
    }
    storm.settle(clients).await?;
    let left = storm.delete_all().await?;
    tokio::time::sleep(REST).await;
    step.finish(&format!("deleted {left} remaining sessions of calls and batches"));
    Ok(())
}

/// Returns what the host holds now, by name.
async fn held(storm: &Storm, process: u32) -> Result<BTreeMap<String, f64>> {
    let mut held = BTreeMap::new();
    if let Some(mb) = resident_mb(process) {
        held.insert("memory, MB".to_owned(), mb);
    }
    if let Ok(files) = std::fs::read_dir(format!("/proc/{process}/fd")) {
        held.insert("open files".to_owned(), files.count() as f64);
    }
    let metrics = storm.metrics().await.context("the host has no metrics")?;
    for (name, what) in [
        ("skep_engine_kv_pages_used", "KV pages in use"),
        ("skep_engine_kv_pages_cached", "KV pages cached"),
        ("skep_instances", "instances"),
        ("skep_open_turns", "open turns"),
        ("skep_store_database_bytes", "database, bytes"),
        ("skep_store_wal_bytes", "WAL, bytes"),
    ] {
        if let Some(value) = metric(&metrics, name) {
            held.insert(what.to_owned(), value);
        }
    }
    let store = Store::open_beside(&storm.database(), Durability::Process).await?;
    for TableRows { table, rows } in store.table_rows().await? {
        held.insert(format!("rows of {table}"), rows as f64);
    }
    store.close().await;
    Ok(held)
}

fn compare(start: &BTreeMap<String, f64>, end: &BTreeMap<String, f64>) -> Vec<Figure> {
    let figure = |(what, end): (&String, &f64)| {
        let start = start.get(what).copied().unwrap_or(0.0);
        let table = what.strip_prefix("rows of ");
        let more = match what.as_str() {
            "memory, MB" => Some(MORE_MEMORY),
            "open files" => Some(MORE_FILES),
            "KV pages in use" | "instances" | "open turns" => Some((0.0, 0.0)),
            _ => table.filter(|table| !KEPT.contains(table)).map(|_| MORE_ROWS),
        };
        let most = more.map(|(share, beside)| start * (1.0 + share) + beside);
        Figure { what: what.clone(), start, end: *end, most }
    };
    end.iter().map(figure).collect()
}

fn resident_mb(process: u32) -> Option<f64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<f64>().ok()? / 1024.0)
}

impl Report {
    fn verdict(&self) -> Result<()> {
        let grown: Vec<&str> = self
            .figures
            .iter()
            .filter(|figure| figure.has_grown())
            .map(|figure| figure.what.as_str())
            .collect();
        let Self { lost, doubled, troubles, seed, .. } = self;
        if grown.is_empty() && lost + doubled + troubles == 0 {
            return Ok(());
        }
        bail!("grown: {grown:?}; {lost} lost, {doubled} doubled, {troubles} other faults, with seed {seed}")
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { seed, wall_s, orders, lost, doubled, .. } = report;
    out::line(&format!("{orders} orders in {wall_s:.0} s with seed {seed}: {lost} lost, {doubled} doubled"))?;
    let rows: Vec<_> = report
        .figures
        .iter()
        .map(|figure| {
            let Figure { what, start, end, most } = figure;
            let verdict = match most {
                _ if figure.has_grown() => "has grown",
                Some(_) => "",
                None => "kept on purpose",
            };
            [what.clone(), format!("{start:.0}"), format!("{end:.0}"), verdict.to_owned()]
        })
        .collect();
    out::table(["HELD", "START", "END", ""], &rows)?;
    for (code, count) in &report.account.failures {
        out::line(&format!("  failed with {code}: {count}"))?;
    }
    for fault in report.account.faults.iter().chain(&report.first_troubles) {
        out::line(&format!("  {fault}"))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn growth_is_judged_except_for_tables_that_are_kept_on_purpose() {
        let held = |memory: f64, used: f64, events: f64, sessions: f64| {
            let figures = [
                ("memory, MB", memory),
                ("KV pages in use", used),
                ("rows of events", events),
                ("rows of sessions", sessions),
            ];
            figures.map(|(what, value)| (what.to_owned(), value)).into_iter().collect::<BTreeMap<_, _>>()
        };
        let grown = |end: BTreeMap<String, f64>| {
            let figures = compare(&held(100.0, 0.0, 10.0, 50.0), &end);
            figures.into_iter().filter(Figure::has_grown).map(|figure| figure.what).collect::<Vec<_>>()
        };
        assert!(grown(held(140.0, 0.0, 9_999.0, 90.0)).is_empty());
        assert_eq!(grown(held(150.0, 1.0, 10.0, 50.0)), ["KV pages in use", "memory, MB"]);
        assert_eq!(grown(held(100.0, 0.0, 10.0, 120.0)), ["rows of sessions"]);
    }
}
