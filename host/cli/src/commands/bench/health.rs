//! `skep bench health`: how quickly `/healthz` answers while clients, guests and imported sessions cause much
//! work.
//!
//! The host runs in this process and is asked over HTTP. One kind of work runs at a time, on several
//! connections, each of which sends one request after the other without a pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use reqwest::Method;
use serde::Serialize;
use serde_json::{Value, json};
use skep_engine::chat::{ChatMessage, Transcript};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};

use super::{super::out, build_agent, percentile, sorted_us};
use crate::catalog;
use crate::client::Client;
use crate::embedded::HOSTILE;
use crate::progress::Terminal;
use crate::{
    server::{self},
    server_options::ServerOptions,
};

/// Time between two checks of the host's health.
const PAUSE: Duration = Duration::from_millis(5);
/// About the maximum size of a body.
const BODY_BYTES: usize = 12 << 20;
/// Placeholder for a name that each client replaces with its own.
const CLIENT: &str = "{client}";
const AGENT: &str = "bench-hostile";
/// Messages of an imported session: the maximum minus one question and its answer.
const MESSAGES: usize = 9_998;

/// Measure how quickly /healthz answers while clients send much work
#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  skep bench health
  skep bench health --seconds 30 --clients 16 --json")]
pub struct Args {
    /// Seconds per kind of work
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3_600))]
    seconds: u64,
    /// Connections that send the work [default: twice the number of CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1_024))]
    clients: Option<u32>,
    /// Model that the host serves
    #[arg(long, value_name = "NAME|PATH", default_value = catalog::DEFAULT_MODEL)]
    model: String,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// Requests that are sent again and again, one after the other.
struct Work {
    name: &'static str,
    requests: Vec<(Method, String, String)>,
}

#[derive(Debug, Serialize)]
struct Report {
    clients: u32,
    seconds: u64,
    rows: Vec<Row>,
}

/// The answers of `/healthz` during one kind of work.
#[derive(Debug, Serialize)]
struct Row {
    work: &'static str,
    answers: usize,
    p50_ms: f64,
    p99_ms: f64,
    max_ms: f64,
    /// Requests of the work that were answered.
    requests: u64,
    /// Requests of the work that were answered with an error.
    refused: u64,
}

/// The answers to one kind of work so far.
#[derive(Default)]
struct Answered {
    requests: AtomicU64,
    refused: AtomicU64,
}

/// Measures how quickly the host answers under each kind of work.
pub async fn run(args: Args) -> Result<()> {
    let options =
        ServerOptions { listen: ([127, 0, 0, 1], 0).into(), model: args.model, ..ServerOptions::default() };
    let component = build_agent(&HOSTILE)?;
    let server = server::start_with(options, Vec::new(), Arc::new(Terminal)).await?;
    let processors = std::thread::available_parallelism().map_or(1, usize::from) as u32;
    let clients = args.clients.unwrap_or(2 * processors);
    let time = Duration::from_secs(args.seconds);
    let url = server.url();
    let client = Client::new(Some(&url))?;
    client.deploy(&format!("name = \"{AGENT}\"\n"), component).await.context("deploying the agent")?;
    let model = server.host.models().default_name();
    let mut rows = vec![beside(&url, None, 0, time).await?];
    for work in works(&model) {
        rows.push(beside(&url, Some(Arc::new(work)), clients, time).await?);
    }
    server.shutdown().await;
    let report = Report { clients, seconds: args.seconds, rows };
    if args.json { out::json(&report) } else { for_people(&report) }
}

fn works(model: &str) -> Vec<Work> {
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
    let work = |name, path: &str, body| Work { name, requests: vec![(Method::POST, path.to_owned(), body)] };
    let session = format!("/v1/agents/{AGENT}/sessions/{CLIENT}");
    let message =
        |text: &str| (Method::POST, format!("{session}/messages"), json!({"text": text}).to_string());
    let import = (Method::PUT, format!("{session}?replace=true"), long_session(model).to_string());
    vec![
        work("prompts of 12 MiB", "/v1/completions", json!({"prompt": text}).to_string()),
        work("messages of 12 MiB", "/v1/chat/completions", json!({"messages": said(&text)}).to_string()),
        work("lists of zeros", "/v1/chat/completions", format!("{{\"messages\": [{zeros}0]}}")),
        work("data of zeros", "/v1/agents/none/sessions/s/messages", format!("{{\"data\": [{zeros}0]}}")),
        work("deep JSON", "/v1/agents/none/sessions/s/messages", "[".repeat(BODY_BYTES)),
        // The requested answer is too long, so nothing is generated.
        work(
            "schemas of 200 patterns",
            "/v1/chat/completions",
            json!({"messages": said("x"), "response_format": form, "max_tokens": 1 << 30}).to_string(),
        ),
        Work { name: "guests' prompts of 21 MiB", requests: vec![message("complete")] },
        Work { name: "imports of 9,998 messages", requests: vec![import, message("talk")] },
    ]
}

/// Returns an exported session with one long conversation.
fn long_session(model: &str) -> Value {
    let mut transcript = Transcript::new();
    for number in 0..MESSAGES / 2 {
        transcript.push(ChatMessage::user(format!("question {number} of many, about nothing at all")));
        transcript.push(ChatMessage::assistant(format!("answer {number}, which says as little")));
    }
    json!({
        "format": "skep.session", "version": 1, "agent": AGENT, "session": "s", "turns": 1,
        "created_at_ms": 1, "updated_at_ms": 1, "state": {},
        "conversations": [{"name": "main", "model": model, "transcript": transcript}],
    })
}

/// Checks the host's health while `clients` clients send the work.
async fn beside(url: &str, work: Option<Arc<Work>>, clients: u32, time: Duration) -> Result<Row> {
    let (stop, answered) = (Arc::new(AtomicBool::new(false)), Arc::new(Answered::default()));
    let mut sending = JoinSet::new();
    for number in 0..clients {
        let Some(work) = work.clone() else { break };
        let (stop, answered, url) = (stop.clone(), answered.clone(), url.to_owned());
        sending.spawn(async move {
            let client = reqwest::Client::new();
            for (method, path, body) in work.requests.iter().cycle() {
                if stop.load(Ordering::Relaxed) {
                    break;
                }
                let address = format!("{url}{}", path.replace(CLIENT, &format!("client-{number}")));
                let sent = client.request(method.clone(), address).body(body.clone()).send().await;
                // Most requests are refused after some work; only the host's health in the meantime counts.
                if let Ok(answer) = sent {
                    answered.requests.fetch_add(1, Ordering::Relaxed);
                    answered.refused.fetch_add(u64::from(!answer.status().is_success()), Ordering::Relaxed);
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
        requests: answered.requests.load(Ordering::Relaxed),
        refused: answered.refused.load(Ordering::Relaxed),
    })
}

/// Checks the host's health for this time, and returns how long each answer took.
async fn health(url: &str, time: Duration) -> Result<Vec<Duration>> {
    let (client, address, began) = (reqwest::Client::new(), format!("{url}/healthz"), Instant::now());
    let mut ticks = interval(PAUSE);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut times = Vec::new();
    while began.elapsed() < time {
        ticks.tick().await;
        let asked = Instant::now();
        let answer = client.get(&address).send().await.context("/healthz did not answer")?;
        ensure!(answer.status().is_success(), "/healthz answered with {}", answer.status());
        times.push(asked.elapsed());
    }
    Ok(times)
}

fn for_people(report: &Report) -> Result<()> {
    let Report { clients, seconds, rows } = report;
    out::line(&format!("/healthz with {clients} busy clients, {seconds} s per kind of work, in ms"))?;
    let row = |row: &Row| {
        let Row { work, answers, p50_ms, p99_ms, max_ms, requests, refused } = row;
        [
            (*work).to_owned(),
            format!("{p50_ms:.1}"),
            format!("{p99_ms:.1}"),
            format!("{max_ms:.1}"),
            answers.to_string(),
            requests.to_string(),
            refused.to_string(),
        ]
    };
    let rows: Vec<[String; 7]> = rows.iter().map(row).collect();
    out::table(["WORK", "P50", "P99", "MAX", "ANSWERS", "REQUESTS", "REFUSED"], &rows)
}
