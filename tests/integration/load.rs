//! Overload and disconnecting clients: no request is lost, refusals say when to retry, and every KV page is
//! free in the end. In dev builds the engine checks the ownership of all pages whenever it is idle.

use crate::harness::{Host, client, model_path};
use futures::{StreamExt, stream, stream::FuturesUnordered};
use reqwest::Response;
use serde_json::{Value, json};
use skep_cli::server::{self, RunningServer};
use skep_engine::EngineStats;
use std::{process::Command, time::Duration};

/// Number of running sequences, and number of waiting requests.
const RUNNING: usize = 4;
const WAITING: usize = 6;
const STREAMS: usize = 64;

async fn small_host(waiting: usize) -> RunningServer {
    let mut options = Host::options(None);
    options.engine.max_sequences = RUNNING;
    options.engine.max_queue = waiting;
    server::start(options).await.expect("the host starts")
}

async fn begin(host: &RunningServer, number: usize, tokens: usize) -> Response {
    let body = json!({"prompt": format!("Story number {number}:"), "max_tokens": tokens, "ignore_eos": true,
        "stream": true, "stream_options": {"include_usage": true}});
    client().post(format!("{}/v1/completions", host.url())).json(&body).send().await.unwrap()
}

/// Reads a stream to its end. It must succeed after `tokens` tokens.
async fn finish(response: Response, tokens: usize) {
    assert_eq!(response.status(), 200);
    let text = response.text().await.unwrap();
    assert!(text.trim_end().ends_with("data: [DONE]"), "{text}");
    assert!(text.contains(&format!("\"completion_tokens\":{tokens}")), "{text}");
}

/// Checks that a refusal gives a reason and a time to retry.
async fn assert_polite(response: Response) {
    assert_eq!(response.status(), 429);
    let retry_after = response.headers().get("retry-after").expect("429 has Retry-After").to_str().unwrap();
    assert!(retry_after.parse::<u32>().unwrap() >= 1, "{retry_after}");
    let error = response.json::<Value>().await.unwrap()["error"].take();
    assert_eq!(error["type"], "rate_limit_error");
    assert!(
        error["message"].is_string() && error["code"].is_string() && error.get("param").is_some(),
        "{error}"
    );
}

/// Stops the host and returns the final statistics of its engine.
async fn stop(host: RunningServer) -> EngineStats {
    let engine = host.host.models().engines().next().expect("a local model").clone();
    host.shutdown().await;
    engine.drain(Duration::from_secs(60)).await;
    engine.stats()
}

fn assert_all_free(stats: &EngineStats) {
    assert_eq!((stats.running, stats.waiting), (0, 0));
    assert_eq!(stats.pages_free, stats.pages_total, "{stats:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_over_the_queue_limit_are_refused_and_the_rest_served() {
    let host = small_host(WAITING).await;
    // Long requests that run until they are dropped, so that exactly the slots of the queue are free.
    let mut holding = Vec::new();
    for number in 0..RUNNING {
        let mut response = begin(&host, number, 4000).await;
        assert!(response.chunk().await.unwrap().is_some(), "the request is running");
        holding.push(response);
    }
    let mut rest: FuturesUnordered<_> = (0..STREAMS).map(|number| begin(&host, 100 + number, 5)).collect();
    for _ in 0..STREAMS - WAITING {
        assert_polite(rest.next().await.unwrap()).await;
    }
    // Clients that disconnect make room for waiting requests.
    drop(holding);
    for _ in 0..WAITING {
        finish(rest.next().await.unwrap(), 5).await;
    }
    assert!(rest.next().await.is_none());
    drop(rest);
    let stats = stop(host).await;
    assert_all_free(&stats);
    assert!(stats.generated_tokens < 4000 * RUNNING as u64, "the long ones were cancelled");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cancellations_among_streams_lose_nothing() {
    // A client that disconnected keeps its slot until the next step, so there are slots for all.
    let host = small_host(STREAMS).await;
    let finished = stream::iter(0..STREAMS)
        .map(|number| {
            let host = &host;
            async move {
                let tokens = 2 + number % 5;
                let mut response = begin(host, number, tokens).await;
                if number % 3 == 0 {
                    // Some streams are dropped at once, some after the first chunk.
                    if number % 2 == 0 {
                        response.chunk().await.unwrap();
                    }
                    return 0;
                }
                finish(response, tokens).await;
                tokens
            }
        })
        .buffer_unordered(2 * RUNNING);
    let finished: usize = finished.fold(0, |sum, tokens| async move { sum + tokens }).await;
    let stats = stop(host).await;
    assert_all_free(&stats);
    assert!(stats.generated_tokens >= finished as u64, "{stats:?}");
}

#[tokio::test]
async fn a_busy_session_also_sends_retry_after() {
    let mut options = Host::options(None);
    options.runtime.mailbox = 1;
    let host = Host::start_with(options);
    assert_eq!(host.deploy_guest("generate", "busy", "[limits]\ntokens_per_turn = 4000\n").await.0, 201);
    let send = |text: &str| {
        let path = host.at("/v1/agents/busy/sessions/one/messages");
        let body = json!({"text": text, "data": {"max_tokens": 3000}});
        client().post(path).header("accept", "text/event-stream").json(&body).send()
    };
    let mut first = send("Tell a long story.").await.unwrap();
    assert!(first.chunk().await.unwrap().is_some(), "its turn is running");
    let mut others: FuturesUnordered<_> = (0..4).map(|_| send("And another one.")).collect();
    // One of the requests waits in the mailbox.
    for _ in 0..3 {
        assert_polite(others.next().await.unwrap().unwrap()).await;
    }
}

#[test]
fn the_load_benchmark_leaks_no_memory_and_no_pages() {
    let arguments = ["bench", "load", "--streams", "8", "--seconds", "2", "--tokens", "8", "--json"];
    let output = Command::new(env!("CARGO_BIN_EXE_skep"))
        .args(arguments)
        .args(["--cancel-share", "0.5", "--overload", "128", "--model", model_path().to_str().unwrap()])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let count = |part: &Value, what: &str| part[what].as_u64().unwrap();
    for part in [&report, &report["overload"]] {
        let ends = ["finished", "cancelled", "refused", "lost"].map(|what| count(part, what));
        assert_eq!(count(part, "started"), ends.iter().sum::<u64>(), "{part}");
        assert_eq!((count(part, "lost"), count(part, "impolite")), (0, 0), "{part}");
    }
    assert!(count(&report["overload"], "refused") > 0, "{report}");
    assert_eq!(report["kv"]["free_after"], report["kv"]["free_before"]);
    // The load touched the weights and the workspaces; the overload needs little beside them.
    let grown = count(&report["memory"], "peak_mb").saturating_sub(count(&report["memory"], "after_mb"));
    assert!(grown < 64, "{grown} MB more than after the load: {report}");
}
