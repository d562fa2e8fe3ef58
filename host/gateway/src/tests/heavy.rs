//! Expensive requests must not delay other requests.

use super::fixture::{Server, TestResponse};
use axum::{body::Body, http::Request};
use serde_json::json;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::task::JoinSet;

/// Maximum delay of other requests. A busy machine may stop everything for as long, so a case gets several attempts.
const BOUND: Duration = Duration::from_secs(1);
const TRIES: usize = 5;
/// More clients than threads that serve requests.
const CLIENTS: usize = 4;

/// A request and its expected error.
struct Case {
    path: &'static str,
    body: String,
    status: u16,
    code: &'static str,
}

fn cases() -> Vec<Case> {
    let text = "the user said hello. ".repeat(400 << 10);
    let case = |path, body, status, code| Case { path, body, status, code };
    let properties: serde_json::Map<String, serde_json::Value> = (0..400)
        .map(|number| {
            (format!("p{number}"), json!({"type": "string", "pattern": format!("^[a-z]{{1,{number}}}$")}))
        })
        .collect();
    let schema = json!({"type": "object", "properties": properties});
    let format = json!({"type": "json_schema", "json_schema": {"name": "s", "schema": schema}});
    let said = |content: &str| json!([{"role": "user", "content": content}]);
    vec![
        case("/v1/completions", json!({"prompt": text}).to_string(), 400, "context_length_exceeded"),
        case(
            "/v1/chat/completions",
            json!({"messages": said(&text)}).to_string(),
            400,
            "context_length_exceeded",
        ),
        case(
            "/v1/chat/completions",
            format!("{{\"messages\": [{}0]}}", "0,".repeat(4 << 20)),
            413,
            "body_too_large",
        ),
        case("/v1/chat/completions", "[".repeat(8 << 20), 413, "body_too_large"),
        case(
            "/v1/agents/none/sessions/s/messages",
            format!("{{\"data\": {}", "[".repeat(8 << 20)),
            400,
            "invalid_json",
        ),
        case(
            "/v1/agents/none/sessions/s/messages",
            format!("{{\"data\": [{}0]}}", "0,".repeat(4 << 20)),
            404,
            "agent_not_found",
        ),
        // The schema takes long to compile, and then the request exceeds the context.
        case(
            "/v1/chat/completions",
            json!({"messages": said("x"), "response_format": format, "max_tokens": 1 << 20}).to_string(),
            400,
            "context_length_exceeded",
        ),
    ]
}

async fn send(server: Arc<Server>, path: &'static str, body: String) -> TestResponse {
    server.send(Request::post(path).body(Body::from(body)).expect("a request")).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_checks_respond_while_clients_send_expensive_requests() {
    let server = Arc::new(Server::start().await);
    for Case { path, body, status, code } in cases() {
        let mut slowest = Vec::new();
        for _ in 0..TRIES {
            slowest.push(slowest_beside(&server, path, &body, status, code).await);
            if slowest.last().is_some_and(|slowest| *slowest < BOUND) {
                break;
            }
        }
        assert!(slowest.last().is_some_and(|slowest| *slowest < BOUND), "{path} {code}: {slowest:?}");
    }
}

async fn slowest_beside(
    server: &Arc<Server>,
    path: &'static str,
    body: &str,
    status: u16,
    code: &str,
) -> Duration {
    let mut attack = JoinSet::new();
    for _ in 0..CLIENTS {
        attack.spawn(send(server.clone(), path, body.to_owned()));
    }
    let mut slowest = Duration::ZERO;
    while !attack.is_empty() {
        while let Some(answer) = attack.try_join_next() {
            let answer = answer.expect("no panic");
            let start: String = answer.text.chars().take(200).collect();
            assert_eq!(
                (answer.status.as_u16(), answer.error()["code"].as_str()),
                (status, Some(code)),
                "{start}"
            );
        }
        let began = Instant::now();
        // The request runs on one of the threads that serve requests.
        let server = server.clone();
        let health = tokio::spawn(async move { server.get("/healthz").await }).await.expect("no panic");
        assert_eq!(health.status, 200);
        slowest = slowest.max(began.elapsed());
    }
    slowest
}

#[tokio::test]
async fn messages_over_the_waiting_bytes_are_429_with_a_retry_delay() {
    let waiting_bytes = skep_runtime::WaitingBytes { session: 64, ..Default::default() };
    let runtime = skep_runtime::RuntimeOptions { waiting_bytes, ..Default::default() };
    let server = Server::with_runtime(Default::default(), runtime).await;
    let answer = server.post("/v1/agents/none/sessions/s/messages", &json!({"text": "x".repeat(100)})).await;
    assert_eq!(answer.status, 404, "a permanent error takes precedence: {}", answer.text);
    let error = skep_runtime::RuntimeError::IntakeFull { message: "full".into(), retry_after_ms: 1_000 };
    let response = axum::response::IntoResponse::into_response(crate::ApiError::from(error));
    assert_eq!(
        (response.status().as_u16(), &response.headers()["retry-after"]),
        (429, &"1".parse().expect("a value"))
    );
}
