//! Tests what the access log and the audit log record, and what they must not contain.

use super::{
    access::{ask, guarded, key},
    fixture::Server,
};
use crate::{AccessOptions, GatewayOptions};
use axum::{
    body::Body,
    extract::ConnectInfo,
    http::{Method, Request},
};
use futures::StreamExt;
use serde_json::{Value, json};
use skep_runtime::Role;
use std::{
    io,
    net::SocketAddr,
    sync::{Arc, Mutex},
};
use tower::ServiceExt;
use tracing::subscriber::DefaultGuard;
use tracing_subscriber::fmt::MakeWriter;

/// The log of this test's thread. The test runs only on this thread.
struct Log {
    written: Written,
    _guard: DefaultGuard,
}

#[derive(Clone, Default)]
struct Written(Arc<Mutex<Vec<u8>>>);

impl io::Write for Written {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Written {
    type Writer = Written;

    fn make_writer(&'a self) -> Written {
        self.clone()
    }
}

impl Log {
    fn start() -> Self {
        let written = Written::default();
        let lines = tracing_subscriber::fmt().json().flatten_event(true).with_writer(written.clone());
        let guard = tracing::subscriber::set_default(lines.with_max_level(tracing::Level::DEBUG).finish());
        Log { written, _guard: guard }
    }

    /// Returns the lines of a target since the last call for any target.
    fn take(&self, target: &str) -> Vec<Value> {
        let bytes = std::mem::take(&mut *self.written.0.lock().unwrap());
        let text = String::from_utf8(bytes).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["target"] == target).collect()
    }

    fn take_one(&self, target: &str) -> Value {
        let mut lines = self.take(target);
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines.remove(0)
    }
}

#[tokio::test]
async fn each_request_is_logged_once_without_client_data() {
    let server = guarded().await;
    let acme = key(&server, "acme", Role::Invoke, None).await;
    let log = Log::start();
    let path = "/v1/agents/echo/sessions/my-session/messages?note=my-note";
    let answer = ask(&server, &acme, Method::POST, path, json!({"text": "my-text"})).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let line = log.take_one("skep::access");
    assert_eq!(line["level"], "INFO");
    assert_eq!(
        (&line["tenant"], &line["method"], &line["status"]),
        (&json!("acme"), &json!("POST"), &json!(200))
    );
    assert_eq!(line["route"], "/v1/agents/{agent}/sessions/{session}/messages");
    assert_eq!(line["request_id"], answer.headers["x-request-id"].to_str().unwrap());
    let id = server.host.keys().list().await.unwrap()[0].id.clone();
    assert_eq!(line["key"], id);
    assert!(line["ms"].as_f64().unwrap() > 0.0);
    assert!(line.get("prompt_tokens").is_none() && line.get("cut_off").is_none(), "{line}");
    let text = line.to_string();
    for own in ["my-session", "my-note", "my-text", acme.as_str()] {
        assert!(!text.contains(own), "{text}");
    }
    log.take("");
    server.get("/v1/models").await;
    let refused = log.take_one("skep::access");
    assert_eq!((&refused["status"], refused.get("tenant")), (&json!(401), None));
    server.get("/healthz").await;
    assert_eq!(log.take_one("skep::access")["level"], "DEBUG");
    server.get("/no/such/path").await;
    assert_eq!(log.take_one("skep::access")["route"], "(other)");
}

#[tokio::test]
async fn a_line_has_the_tokens_of_the_response_in_every_format() {
    let server = Server::start().await;
    let log = Log::start();
    let messages = json!([{"role": "user", "content": "x"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"messages": messages, "max_tokens": 3, "ignore_eos": true})),
        (
            "/v1/chat/completions",
            json!({"messages": messages, "max_tokens": 3, "ignore_eos": true, "stream": true}),
        ),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 3, "ignore_eos": true})),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 3, "ignore_eos": true, "stream": true})),
        ("/ai/run/tiny", json!({"messages": messages, "max_tokens": 3, "ignore_eos": true})),
        ("/ai/run/tiny", json!({"prompt": "x", "max_tokens": 3, "stream": true})),
    ] {
        server.ok(path, &body).await;
        let line = log.take_one("skep::access");
        assert!(line["prompt_tokens"].as_u64() > Some(0), "{body}: {line}");
        let output = line["output_tokens"].as_u64().unwrap();
        assert!((1..=3).contains(&output), "{body}: {line}");
        assert!(line.get("cut_off").is_none(), "{body}: {line}");
    }
}

#[tokio::test]
async fn a_stream_is_logged_when_it_ends_even_if_the_client_disconnects() {
    let server = Server::start().await;
    let log = Log::start();
    let body = json!({"messages": [{"role": "user", "content": "x"}], "max_tokens": 3_000, "ignore_eos": true,
                      "stream": true});
    let request = Request::post("/v1/chat/completions").body(Body::from(body.to_string())).unwrap();
    let response = server.router.clone().oneshot(request).await.unwrap();
    let mut stream = response.into_body().into_data_stream();
    stream.next().await.unwrap().unwrap();
    assert!(log.take("skep::access").is_empty(), "the stream continues");
    drop(stream);
    let line = log.take_one("skep::access");
    assert_eq!((&line["status"], &line["cut_off"]), (&json!(200), &json!(true)));
}

#[tokio::test]
async fn a_line_has_the_client_reported_by_a_trusted_proxy() {
    let options =
        GatewayOptions { trusted_proxies: vec!["10.0.0.0/8".parse().unwrap()], ..GatewayOptions::default() };
    let server = Server::with(options).await;
    let log = Log::start();
    for (peer, expected) in [("10.0.0.7:9", "198.51.100.1"), ("203.0.113.5:9", "203.0.113.5")] {
        let peer: SocketAddr = peer.parse().unwrap();
        let request = Request::get("/v1/models").header("x-forwarded-for", "6.6.6.6, 198.51.100.1");
        server.send(request.extension(ConnectInfo(peer)).body(Body::empty()).unwrap()).await;
        assert_eq!(log.take_one("skep::access")["client"], expected);
    }
}

#[tokio::test]
async fn operator_actions_are_logged_with_the_caller_and_the_result() {
    let server = guarded().await;
    let admin = key(&server, "local", Role::Admin, None).await;
    let invoke = key(&server, "acme", Role::Invoke, None).await;
    let log = Log::start();
    let session = "/v1/agents/echo/sessions/s";
    for (act, method, path, body, subject, details) in [
        (
            "session.delete",
            Method::DELETE,
            "/v1/agents/echo/sessions/none",
            Value::Null,
            "agent=echo session=none",
            "",
        ),
        ("agent.rollback", Method::POST, "/v1/agents/echo/rollback", json!({"version": 9}), "agent=echo", ""),
        ("agent.delete", Method::DELETE, "/v1/agents/other", Value::Null, "agent=other", ""),
        (
            "key.create",
            Method::POST,
            "/v1/keys",
            json!({"tenant": "acme", "role": "read"}),
            "",
            "tenant=acme role=read",
        ),
        ("key.revoke", Method::DELETE, "/v1/keys/none", Value::Null, "key=none", ""),
        (
            "secret.set",
            Method::PUT,
            "/v1/secrets/TOKEN",
            json!({"value": "q7Zx-very-secret-4Kp", "hosts": ["https://api.example.com"], "agent": "echo"}),
            "name=TOKEN",
            "agent=echo",
        ),
        (
            "secret.delete",
            Method::DELETE,
            "/v1/secrets/TOKEN?agent=echo",
            Value::Null,
            "name=TOKEN",
            "agent=echo",
        ),
        (
            "webhook.add",
            Method::POST,
            "/v1/webhooks",
            json!({"url": "https://example.com/my-path", "topics": ["skep.turn.failed"]}),
            "",
            "origin=https://example.com",
        ),
        ("webhook.test", Method::POST, "/v1/webhooks/none/test", Value::Null, "webhook=none", ""),
        ("webhook.remove", Method::DELETE, "/v1/webhooks/none", Value::Null, "webhook=none", ""),
        ("webhook.redeliver", Method::POST, "/v1/webhooks/dead-letters/7/redeliver", Value::Null, "id=7", ""),
        ("approval.decide", Method::POST, "/v1/approvals/none", json!({"decision": "deny"}), "id=none", ""),
        (
            "schedule.run",
            Method::POST,
            "/v1/agents/echo/schedules/none/run",
            Value::Null,
            "agent=echo id=none",
            "",
        ),
        (
            "schedule.cancel",
            Method::DELETE,
            "/v1/agents/echo/schedules/none",
            Value::Null,
            "agent=echo id=none",
            "",
        ),
        ("agent.deploy", Method::POST, "/v1/agents", Value::Null, "", ""),
        ("session.import", Method::PUT, session, json!({}), "agent=echo session=s", ""),
    ] {
        let answer = ask(&server, &admin, method.clone(), path, body).await;
        let line = log.take_one("skep::audit");
        let result = if answer.status.is_success() { "done" } else { "refused" };
        assert_eq!(
            (&line["act"], &line["request_id"]),
            (&json!(act), &json!(answer.headers["x-request-id"].to_str().unwrap()))
        );
        assert_eq!(
            (&line["result"], &line["status"]),
            (&json!(result), &json!(answer.status.as_u16())),
            "{line}"
        );
        assert_eq!((&line["tenant"], &line["role"]), (&json!("local"), &json!("admin")), "{line}");
        assert!(line["by"].as_str().unwrap().starts_with("key"), "{line}");
        assert_eq!(line["subject"], subject, "{line}");
        let told = line["details"].as_str().unwrap_or("");
        assert!(told.contains(details) && (details.is_empty() || result == "done"), "{line}");
        for secret in ["q7Zx-very-secret-4Kp", "my-path", "skep_", "whsec_"] {
            assert!(!line.to_string().contains(secret), "{line}");
        }
    }
    // A caller without permission is logged, too; an action of a client on its own session is not an operator action.
    ask(&server, &invoke, Method::DELETE, "/v1/agents/echo", Value::Null).await;
    let line = log.take_one("skep::audit");
    assert_eq!(
        (&line["result"], &line["role"], &line["tenant"]),
        (&json!("refused"), &json!("invoke"), &json!("acme"))
    );
    ask(&server, &invoke, Method::DELETE, session, Value::Null).await;
    assert!(log.take("skep::audit").is_empty());
}

#[tokio::test]
async fn reading_the_content_of_tenants_is_logged_once_a_minute() {
    let server = guarded().await;
    let admin = key(&server, "local", Role::Admin, None).await;
    let invoke = key(&server, "acme", Role::Invoke, None).await;
    let log = Log::start();
    let acme = "/v1/agents/echo/sessions/acme%2Fs";
    let reads = [
        ("session.read", acme.to_owned(), "agent=echo session=acme/s"),
        ("session.read", format!("{acme}/turns/t"), "agent=echo session=acme/s turn=t"),
        ("session.read", format!("{acme}/turns/t2/timeline"), "agent=echo session=acme/s turn=t2"),
        ("sessions.search", "/v1/sessions?text=honey".to_owned(), ""),
        ("sessions.search", "/v1/sessions?te%78t=honey&tenant=acme".to_owned(), "tenant=acme"),
        ("logs.read", "/v1/agents/echo/logs".to_owned(), "agent=echo"),
        ("logs.read", "/v1/logs".to_owned(), ""),
        ("approvals.read", "/v1/approvals".to_owned(), ""),
        ("schedules.read", "/v1/schedules".to_owned(), ""),
        ("events.read", "/v1/events".to_owned(), ""),
        ("dead_letters.read", "/v1/webhooks/dead-letters".to_owned(), ""),
        ("requests.read", "/v1/requests?limit=3&bodies=true".to_owned(), ""),
        ("request.read", "/v1/requests/7".to_owned(), "id=7"),
    ];
    for (act, path, subject) in &reads {
        let answer = ask(&server, &admin, Method::GET, path, Value::Null).await;
        let line = log.take_one("skep::audit");
        assert_eq!((&line["act"], &line["subject"]), (&json!(act), &json!(subject)), "{line}");
        assert_eq!(
            (&line["status"], &line["role"]),
            (&json!(answer.status.as_u16()), &json!("admin")),
            "{line}"
        );
    }
    for (_, path, _) in &reads {
        ask(&server, &admin, Method::GET, path, Value::Null).await;
    }
    // An admin's own sessions, records without prompts, and what a tenant reads of its own.
    for path in [
        "/v1/agents/echo/sessions/s/turns",
        "/v1/requests?limit=3",
        "/v1/sessions?search=honey",
        "/v1/sessions?text=honey&tenant=local",
    ] {
        ask(&server, &admin, Method::GET, path, Value::Null).await;
    }
    for path in ["/v1/agents/echo/sessions/s/turns", "/v1/approvals", "/v1/logs", "/v1/sessions?text=honey"] {
        ask(&server, &invoke, Method::GET, path, Value::Null).await;
    }
    assert!(log.take("skep::audit").is_empty());
}

#[tokio::test]
async fn a_host_without_keys_logs_the_actions_of_every_caller() {
    let access = AccessOptions { keys_required: false, ..AccessOptions::default() };
    let server = Server::with(GatewayOptions { access, ..GatewayOptions::default() }).await;
    let log = Log::start();
    server.send(Request::delete("/v1/agents/none").body(Body::empty()).unwrap()).await;
    let line = log.take_one("skep::audit");
    assert_eq!(
        (&line["by"], &line["act"], &line["result"]),
        (&json!("operator"), &json!("agent.delete"), &json!("refused"))
    );
}
