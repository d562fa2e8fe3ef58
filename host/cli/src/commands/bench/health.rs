//! `skep bench health`: how soon `/healthz` is answered while clients send what is much work.
//!
//! The host runs in this process and is asked over HTTP. One kind of work at a time comes from several connections, one
//! request after the other without a pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use serde::Serialize;
use serde_json::json;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::{super::out, percentile, sorted_us};
use crate::catalog;
use crate::progress::Terminal;
use crate::server::{self, ServerOptions};

/// Between two questions after the host's health.
const PAUSE: Duration = Duration::from_millis(5);
/// About as much as a body may have.
const BODY_BYTES: usize = 12 << 20;

/// Measure how soon /healthz is answered while clients send much work
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench health
  skep bench health --seconds 30 --clients 16 --json")]
pub struct Args {
    /// Seconds of each kind of work
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// Connections that send it [default: twice the processors]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    clients: Option<u32>,
    /// Model that the host serves
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// A request that is sent again and again.
struct Work {
    name: &'static str,
    path: &'static str,
    body: String,
}

#[derive(Debug, Serialize)]
struct Report {
    clients: u32,
    seconds: u64,
    rows: Vec<Row>,
}

/// The answers of `/healthz` beside one kind of work.
#[derive(Debug, Serialize)]
struct Row {
    work: &'static str,
    answers: usize,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// Requests of the work that were answered.
    requests: u64,
}

pub async fn run(args: Args) -> Result<()> {
    let options =
        ServerOptions { listen: ([127, 0, 0, 1], 0).into(), model: args.model, ..ServerOptions::default() };
    let server = server::start_with(options, Vec::new(), Arc::new(Terminal)).await?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let clients = args.clients.unwrap_or(2 * processors);
    let time = Duration::from_secs(args.seconds);
    let url = server.url();
    let mut rows = vec![beside(&url, None, 0, time).await?];
    for work in works() {
        rows.push(beside(&url, Some(Arc::new(work)), clients, time).await?);
    }
    server.shutdown().await;
    let report = Report { clients, seconds: args.seconds, rows };
    if args.json { out::json(&report) } else { for_people(&report) }
}

fn works() -> Vec<Work> {
    let text = "the user said hello. ".repeat(BODY_BYTES / 21);
    let said = |content: &str| json!([{"role": "user", "content": content}]);
    let zeros = "0,".repeat(BODY_BYTES / 2);
    let properties: serde_json::Map<String, serde_json::Value> = (0..200)
        .map(|number| {
            (format!("p{number}"), json!({"type": "string", "pattern": format!("^[a-z]{{1,{number}}}$")}))
        })
        .collect();
    let schema = json!({"type": "object", "properties": properties});
    let form = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let work = |name, path, body| Work { name, path, body };
    vec![
        work("prompts of 12 MiB", "/v1/completions", json!({"prompt": text}).to_string()),
        work("messages of 12 MiB", "/v1/chat/completions", json!({"messages": said(&text)}).to_string()),
        work("lists of zeros", "/v1/chat/completions", format!("{{\"messages\": [{zeros}0]}}")),
        work("data of zeros", "/v1/agents/none/sessions/s/messages", format!("{{\"data\": [{zeros}0]}}")),
        work("deep JSON", "/v1/agents/none/sessions/s/messages", "[".repeat(BODY_BYTES)),
        // Too long an answer is asked for, so that nothing is generated.
        work(
            "schemas of 200 patterns",
            "/v1/chat/completions",
            json!({"messages": said("x"), "response_format": form, "max_tokens": 1 << 30}).to_string(),
        ),
    ]
}

/// Asks for the host's health while so many clients send the work.
async fn beside(url: &str, work: Option<Arc<Work>>, clients: u32, time: Duration) -> Result<Row> {
    let (stop, requests) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let mut sending = JoinSet::new();
    for _ in 0..clients {
        let Some(work) = work.clone() else { break };
        let (stop, requests, address) = (stop.clone(), requests.clone(), format!("{url}{}", work.path));
        sending.spawn(async move {
            let client = reqwest::Client::new();
            while !stop.load(Ordering::Relaxed) {
                let sent = client.post(&address).body(work.body.clone()).send().await;
                // The answer is a refusal; only how the host is beside it counts.
                if sent.is_ok() {
                    requests.fetch_add(1, Ordering::Relaxed);
                }
            }
        });
    }
    let times = health(url, time).await;
    stop.store(true, Ordering::Relaxed);
    sending.join_all().await;
    let us = sorted_us(times?);
    let ms = |share| percentile(&us, share) / 1_000.0;
    Ok(Row {
        work: work.map_or("nothing", |work| work.name),
        answers: us.len(),
        p50_ms: ms(0.5),
        p99_ms: ms(0.99),
        max_ms: ms(1.0),
        requests: requests.load(Ordering::Relaxed),
    })
}

/// How long each answer took.
async fn health(url: &str, time: Duration) -> Result<Vec<Duration>> {
    let (client, address, began) = (reqwest::Client::new(), format!("{url}/healthz"), Instant::now());
    let mut ticks = interval(PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut times = Vec::new();
    while began.elapsed() < time {
        ticks.tick().await;
        let asked = Instant::now();
        let answer = client.get(&address).send().await.context("/healthz is not answered")?;
        ensure!(answer.status().is_success(), "/healthz is answered with {}", answer.status());
        times.push(asked.elapsed());
    }
    Ok(times)
}

fn for_people(report: &Report) -> Result<()> {
    let Report { clients, seconds, rows } = report;
    out::line(&format!("/healthz beside {clients} clients, {seconds} s each, in ms"))?;
    let row = |row: &Row| {
        let Row { work, answers, p50_ms, p99_ms, max_ms, requests } = row;
        [
            (*work).to_owned(),
            format!("{p50_ms:.1}"),
            format!("{p99_ms:.1}"),
            format!("{max_ms:.1}"),
            answers.to_string(),
            requests.to_string(),
        ]
    };
    let rows: Vec<[String; 6]> = rows.iter().map(row).collect();
    out::table(["BESIDE", "P50", "P99", "MAX", "ANSWERS", "REQUESTS BESIDE"], &rows)
}
