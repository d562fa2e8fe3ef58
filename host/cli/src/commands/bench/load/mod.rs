//! `skep bench load`: many streams at once for a while, some of them cancelled, and then more than there is
//! room for.
//!
//! It checks that nothing is lost: every stream that started finishes or is cancelled here, every refusal
//! says when to retry, and every KV page is free again at the end.

mod streams;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use skep_engine::EngineStats;

use super::target::{Target, TargetArgs};
use crate::commands::out;
use crate::progress::{Progress as _, Terminal};
use crate::server_options::ServerOptions;
use streams::{Counts, Plan};

/// Keep a server under load, and check that nothing is lost
///
/// Keeps a number of streams running at the same time. Each one is read to its end and replaced by a new one;
/// a share of them is cancelled at random points. Then sends more requests at once than a queue holds: the
/// excess must be refused with 429 and `Retry-After`. Fails if anything was lost or, for a host in this
/// process, if a KV page is not free afterwards.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench load
  skep bench load --streams 256 --seconds 300 --cancel-share 0.5
  skep bench load --url http://127.0.0.1:8080/v1 --json")]
pub struct Args {
    #[command(flatten)]
    target: TargetArgs,
    /// Streams that run at the same time; the queue of a host in this process has room for the same number
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=4096))]
    streams: u32,
    /// Time during which new streams are started
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    seconds: u64,
    /// Exact number of tokens of each stream
    #[arg(long, value_name = "TOKENS", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// Share of the streams that is cancelled
    #[arg(long, value_name = "SHARE", default_value_t = 0.2, value_parser = share)]
    cancel_share: f64,
    /// Number of requests to send at once at the end [default: 4 times --streams]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=16384))]
    overload: Option<u32>,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    target: String,
    streams: u32,
    wall_s: f64,
    tokens_per_s: f64,
    #[serde(flatten)]
    load: Counts,
    overload: Counts,
    /// Memory of this process, which includes the client.
    memory: Memory,
    /// `null` for another server.
    kv: Option<Kv>,
}

/// Resident memory, if the system reports it.
#[derive(Debug, Serialize)]
struct Memory {
    start_mb: Option<u64>,
    after_mb: Option<u64>,
    peak_mb: Option<u64>,
}

#[derive(Debug, Serialize)]
struct Kv {
    pages: usize,
    /// Pages that are free, or cached and evicted on demand, before the load.
    free_before: usize,
    /// The same after everything has finished.
    free_after: usize,
    cached_after: usize,
}

/// Runs the streams, and fails if something was lost.
pub async fn run(args: Args) -> Result<()> {
    let mut options = ServerOptions::default();
    options.engine.max_queue = args.streams as usize;
    let target = Arc::new(Target::start(&args.target, options).await?);
    let (before, start_mb) = (target.stats(), resident_mb("VmRSS:"));

    let step = Terminal.begin(&format!("{} streams for {} s", args.streams, args.seconds), None);
    let started = Instant::now();
    let plan = Plan {
        streams: args.streams,
        tokens: args.tokens,
        cancel_share: args.cancel_share,
        until: started + Duration::from_secs(args.seconds),
    };
    let load = streams::hold(&target, plan, step.as_ref()).await?;
    let wall_s = started.elapsed().as_secs_f64();
    step.finish(&format!("{} streams", load.started));
    let after_mb = resident_mb("VmRSS:");

    let requests = args.overload.unwrap_or(4 * args.streams);
    let step = Terminal.begin(&format!("{requests} requests at once"), None);
    let overload = streams::burst(&target, requests, args.tokens).await?;
    step.finish(&format!("{} refused", overload.refused));

    let label = target.label.clone();
    let Some(target) = Arc::into_inner(target) else { bail!("a stream outlived the load") };
    // Stopping waits for the streams that were cancelled last.
    let after = target.stop().await;
    let report = Report {
        target: label,
        streams: args.streams,
        wall_s,
        tokens_per_s: load.tokens as f64 / wall_s,
        load,
        overload,
        memory: Memory { start_mb, after_mb, peak_mb: resident_mb("VmHWM:") },
        kv: before.zip(after).map(|(before, after)| Kv::new(&before, &after)),
    };
    if args.json {
        out::json(&report)?
    } else {
        for_people(&report)?
    }
    report.verdict()
}

impl Kv {
    fn new(before: &EngineStats, after: &EngineStats) -> Self {
        Self {
            pages: after.pages_total,
            free_before: before.pages_free,
            free_after: after.pages_free,
            cached_after: after.pages_cached,
        }
    }
}

impl Report {
    fn verdict(&self) -> Result<()> {
        let Counts { lost, impolite, first_fault, .. } = &self.load;
        let fault = first_fault.as_ref().or(self.overload.first_fault.as_ref());
        let fault = fault.map(|fault| format!("; the first: {fault}")).unwrap_or_default();
        if lost + self.overload.lost > 0 {
            bail!("{} streams were lost{fault}", lost + self.overload.lost);
        }
        if impolite + self.overload.impolite > 0 {
            bail!("{} refusals were not 429 with Retry-After{fault}", impolite + self.overload.impolite);
        }
        match &self.kv {
            Some(kv) if kv.free_after != kv.free_before => {
                bail!(
                    "{} of {} KV pages are free, but {} were free before",
                    kv.free_after,
                    kv.pages,
                    kv.free_before
                )
            }
            _ => Ok(()),
        }
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { target, streams, wall_s, tokens_per_s, memory, .. } = report;
    out::line(&format!(
        "{target}: {streams} streams at the same time for {wall_s:.1} s, {tokens_per_s:.1} tok/s"
    ))?;
    for (what, counts) in [("load", &report.load), ("overload", &report.overload)] {
        let Counts { started, finished, cancelled, refused, lost, .. } = counts;
        out::line(&format!(
            "  {what:<9} {started} started, {finished} finished, {cancelled} cancelled, {refused} refused, {lost} lost"
        ))?;
    }
    let mb = |mb: Option<u64>| mb.map_or_else(|| "?".to_owned(), |mb| mb.to_string());
    let Memory { start_mb, after_mb, peak_mb } = memory;
    out::line(&format!(
        "  memory    {} MB at the start, {} MB after the load, {} MB at the peak",
        mb(*start_mb),
        mb(*after_mb),
        mb(*peak_mb)
    ))?;
    if let Some(Kv { pages, free_before, free_after, cached_after }) = &report.kv {
        out::line(&format!(
            "  KV pages  {free_before} of {pages} free before, {free_after} after, {cached_after} of these are cached"
        ))?;
    }
    Ok(())
}

/// Returns a line of this process's status in /proc, in MB.
fn resident_mb(field: &str) -> Option<u64> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix(field))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib / 1024)
}

fn share(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(share) if (0.0..=1.0).contains(&share) => Ok(share),
        _ => Err("a share must be between 0 and 1".to_owned()),
    }
}
