//! `skep bench invoke`: the end-to-end cost of everything around a model.

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use serde::Serialize;
use skep_model::ExecutorOptions;

use super::{super::out, build_agent, percentile};
use crate::catalog;
use crate::client::Client;
use crate::embedded::NOOP;
use crate::progress::Terminal;
use crate::{
    server::{self},
    server_options::{DataDir, ServerOptions},
};

const AGENT: &str = "bench-noop";

/// Measure the invocation of a warm agent that does no inference
///
/// A client in this process sends requests over HTTP on loopback, with connections kept alive. Each one is a
/// request, a call of a sandboxed component, a committed turn and an answer. Each client has its own session.
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench invoke
  skep bench invoke --requests 20000 --concurrency 8 --json
  skep bench invoke --data /var/tmp/skep-bench      with the database in a file")]
pub struct Args {
    /// Number of requests to measure
    #[arg(long, value_name = "N", default_value_t = 5000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    requests: u32,
    /// Clients that run at the same time
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1024))]
    concurrency: u32,
    /// Folder for the database [default: in memory]
    #[arg(long, value_name = "DIR")]
    data: Option<std::path::PathBuf>,
    /// Model that the host loads, although no request uses it
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    requests: usize,
    concurrency: u32,
    p50_ms: f64,
    p90_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    requests_per_s: f64,
}

/// Measures requests to an agent that does nothing, and prints their rate and latency.
pub async fn run(args: Args) -> Result<()> {
    let component = build_agent(&NOOP)?;
    let options = ServerOptions {
        listen: ([127, 0, 0, 1], 0).into(),
        data: args.data.clone().map_or(DataDir::InMemory, DataDir::Path),
        model: args.model.clone(),
        // The model runs on the CPU, because no request uses it.
        executor: ExecutorOptions::default(),
        ..ServerOptions::default()
    };
    let server = server::start_with(options, Vec::new(), Arc::new(Terminal)).await?;
    let url = server.url();
    let manifest = format!("name = \"{AGENT}\"\n");
    Client::new(Some(&url))?.deploy(&manifest, component).await.context("deploying the agent")?;

    let per_client = args.requests.div_ceil(args.concurrency);
    let started = Instant::now();
    let clients: Vec<_> =
        (0..args.concurrency).map(|index| tokio::spawn(measure(url.clone(), index, per_client))).collect();
    let mut latencies = Vec::new();
    for client in clients {
        latencies.extend(client.await.context("a client panicked")??);
    }
    let elapsed = started.elapsed();
    server.shutdown().await;
    let report = report(latencies, args.concurrency, elapsed);
    if args.json { out::json(&report) } else { for_people(&report) }
}

/// Measures the latencies of one client, after some requests to warm up.
async fn measure(url: String, index: u32, requests: u32) -> Result<Vec<Duration>> {
    let client = Client::new(Some(&url))?;
    let session = format!("client-{index}");
    for _ in 0..(requests / 10).clamp(1, 200) {
        client.send(AGENT, &session, "warm").await?;
    }
    let mut latencies = Vec::with_capacity(requests as usize);
    for _ in 0..requests {
        let started = Instant::now();
        client.send(AGENT, &session, "ping").await?;
        latencies.push(started.elapsed());
    }
    Ok(latencies)
}

fn report(latencies: Vec<Duration>, concurrency: u32, elapsed: Duration) -> Report {
    let mut ms: Vec<f64> = latencies.iter().map(|latency| latency.as_secs_f64() * 1000.0).collect();
    ms.sort_by(f64::total_cmp);
    Report {
        requests: ms.len(),
        concurrency,
        p50_ms: percentile(&ms, 0.5),
        p90_ms: percentile(&ms, 0.9),
        p99_ms: percentile(&ms, 0.99),
        max_ms: percentile(&ms, 1.0),
        requests_per_s: ms.len() as f64 / elapsed.as_secs_f64(),
    }
}

fn for_people(report: &Report) -> Result<()> {
    let Report { requests, concurrency, p50_ms, p90_ms, p99_ms, max_ms, requests_per_s } = report;
    out::line(&format!("{requests} invocations of a warm agent without inference, {concurrency} at a time"))?;
    out::line(&format!(
        "  p50 {p50_ms:.3} ms   p90 {p90_ms:.3} ms   p99 {p99_ms:.3} ms   max {max_ms:.3} ms"
    ))?;
    out::line(&format!("  {requests_per_s:.0} requests per second"))
}
