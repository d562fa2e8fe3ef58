//! Tests turns that continue without their client, and clients that reconnect to them.

use super::fixture::{Server, TestResponse};
use axum::{body::Body, http::Request};
use serde_json::{Value, json};
use skep_runtime::Manifest;
use wit_component::{ComponentEncoder, StringEncoding, embed_component_metadata};
use wit_parser::Resolve;

const MESSAGES: &str = "/v1/agents/echo/sessions/s/messages";

/// Returns an agent that replies with the message's text. It traps at a text that begins with `!`, and computes until its
/// limit at one that begins with `~`.
pub(crate) fn echo() -> Vec<u8> {
    let mut module = wat::parse_str(
        r#"(module
            (memory (export "memory") 1)
            (global $free (mut i32) (i32.const 1024))
            (func (export "cabi_realloc") (param i32 i32 i32 i32) (result i32)
                (local $at i32)
                (local.set $at (i32.and (i32.add (global.get $free) (i32.const 7)) (i32.const -8)))
                (global.set $free (i32.add (local.get $at) (local.get 3)))
                (local.get $at))
            (func (export "skep:agent/handler@0.1.1#describe") (result i32) (i32.const 64))
            (func (export "skep:agent/handler@0.1.1#on-message") (param $message i32) (result i32)
                (if (i32.eq (i32.load8_u (i32.load (local.get $message))) (i32.const 33)) (then unreachable))
                (if (i32.eq (i32.load8_u (i32.load (local.get $message))) (i32.const 126)) (then (loop $on (br $on))))
                (i64.store offset=4 (i32.const 128) (i64.load (local.get $message)))
                (i32.const 128)))"#,
    )
    .unwrap();
    let mut resolve = Resolve::default();
    resolve.push_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../../wit/skep-agent")).unwrap();
    let package = resolve
        .push_str("test.wit", "package skep:test; world test { include skep:agent/agent@0.1.1; }")
        .unwrap();
    let world = resolve.select_world(&[package], Some("test")).unwrap();
    embed_component_metadata(&mut module, &resolve, world, StringEncoding::UTF8).unwrap();
    ComponentEncoder::default().module(&module).unwrap().encode().unwrap()
}

pub(super) async fn server() -> Server {
    let server = Server::start().await;
    deploy(&server, "name = \"echo\"").await;
    server
}

/// Deploys the agent so that a turn that computes until its limit does so for longer than a test takes.
pub(super) async fn deploy_with_time(server: &Server) {
    deploy(server, "name = \"echo\"\n[limits]\ncpu_ms = 60000").await;
}

async fn deploy(server: &Server, manifest: &str) {
    let manifest = Manifest::from_toml(manifest).unwrap();
    server.host.deploy(manifest, echo(), "tester").await.unwrap();
}

async fn send(server: &Server, path: &str, text: &str, headers: &[(&str, &str)]) -> TestResponse {
    let mut request = Request::post(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    server.send(request.body(Body::from(json!({ "text": text }).to_string())).unwrap()).await
}

async fn events(server: &Server, path: &str, last_id: Option<&str>) -> TestResponse {
    let mut request = Request::get(path);
    if let Some(id) = last_id {
        request = request.header("last-event-id", id);
    }
    server.send(request.body(Body::empty()).unwrap()).await
}

/// Returns the ids and names of the events.
fn names(answer: &TestResponse) -> Vec<(String, String)> {
    let field = |event: &str, name: &str| {
        let line = event.lines().find_map(|line| line.strip_prefix(name)).unwrap_or_default();
        line.trim().to_owned()
    };
    let events = answer.text.split("\n\n").filter(|event| !event.trim().is_empty());
    events.map(|event| (field(event, "id:"), field(event, "event:"))).collect()
}

fn pairs(expected: &[(&str, &str)]) -> Vec<(String, String)> {
    expected.iter().map(|(id, name)| ((*id).to_owned(), (*name).to_owned())).collect()
}

#[tokio::test]
async fn an_asynchronous_turn_is_accepted_and_can_be_read_later() {
    let server = server().await;
    for (path, headers) in
        [(MESSAGES, &[("prefer", "respond-async, wait=1")][..]), (&format!("{MESSAGES}?detach=true"), &[])]
    {
        let accepted = send(&server, path, "hello", headers).await;
        assert_eq!(accepted.status, 202, "{}", accepted.text);
        let url = accepted.json()["url"].as_str().unwrap().to_owned();
        assert_eq!(accepted.headers["location"], url);
        let all = events(&server, &format!("{url}/events"), None).await;
        assert_eq!(names(&all), pairs(&[("0", "turn"), ("1", "done")]));
        let turn = server.get(&url).await.json();
        assert_eq!((&turn["state"], &turn["text"]), (&json!("done"), &json!("hello")));
        assert_eq!(turn["turn_id"], accepted.json()["turn_id"]);
        assert_eq!(turn["message"], json!({"text": "hello", "data": null}));
    }
}

#[tokio::test]
async fn a_reconnecting_client_gets_the_events_it_has_not_seen() {
    let server = server().await;
    let stream = send(&server, MESSAGES, "hello", &[("accept", "text/event-stream")]).await;
    assert_eq!(names(&stream), pairs(&[("0", "turn"), ("1", "done")]));
    let first = stream.text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let first: Value = serde_json::from_str(first).unwrap();
    let path = format!("/v1/agents/echo/sessions/s/turns/{}/events", first["turn_id"].as_str().unwrap());
    assert_eq!(events(&server, &path, None).await.text, stream.text);
    assert_eq!(names(&events(&server, &path, Some("0")).await), pairs(&[("1", "done")]));
    for nothing_more in ["1", "99999"] {
        let over = events(&server, &path, Some(nothing_more)).await;
        assert_eq!((over.status.as_u16(), over.text.as_str()), (204, ""), "an EventSource stops");
    }
    let refused = events(&server, &path, Some("x")).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!("last-event-id")));
}

#[tokio::test]
async fn an_empty_message_is_refused() {
    let server = server().await;
    for body in [json!({}), json!({"text": ""}), json!({"data": null})] {
        let refused = server.post(MESSAGES, &body).await;
        let code = refused.error()["code"].take();
        assert_eq!((refused.status.as_u16(), code), (422, json!("invalid_message")), "{body}");
    }
    let list = server.post(MESSAGES, &json!(["hi", {}])).await;
    assert_eq!((list.status.as_u16(), &list.error()["code"]), (400, &json!("invalid_json")), "{}", list.text);
    let chat = json!({"model": "agent:echo", "user": "s", "messages": [{"role": "user", "content": ""}]});
    assert_eq!(server.post("/v1/chat/completions", &chat).await.error()["param"], "messages");
    server.ok(MESSAGES, &json!({"data": {}})).await;
    assert_eq!(server.get("/v1/agents/echo/sessions/s").await.json()["turns"], 1);
}

#[tokio::test]
async fn a_repeated_key_is_the_same_turn_and_with_another_message_is_refused() {
    let server = server().await;
    let key = &[("idempotency-key", "k")];
    let first = send(&server, MESSAGES, "hello", key).await;
    assert_eq!((first.status.as_u16(), first.json()["turn"].as_u64()), (200, Some(1)));
    assert_eq!(send(&server, MESSAGES, "hello", key).await.json(), first.json());
    let two = send(&server, MESSAGES, "hello", &[("idempotency-key", "k"), ("idempotency-key", "l")]).await;
    assert_eq!((two.status.as_u16(), &two.error()["param"]), (400, &json!("idempotency-key")));
    let other = send(&server, MESSAGES, "something else", key).await;
    assert_eq!((other.status.as_u16(), &other.error()["code"]), (422, &json!("invalid_message")));
}

#[tokio::test]
async fn a_failed_turn_reports_why_and_an_unknown_turn_is_404() {
    let server = server().await;
    let accepted = send(&server, MESSAGES, "!", &[("prefer", "respond-async")]).await.json();
    let url = accepted["url"].as_str().unwrap();
    let events = events(&server, &format!("{url}/events"), None).await;
    // A turn that has failed by now keeps only its error.
    assert_eq!(names(&events).last(), pairs(&[("", "error")]).last());
    assert!(events.text.contains("agent_trapped"), "{}", events.text);
    let turn = server.get(url).await.json();
    assert_eq!((&turn["state"], &turn["error"]["code"]), (&json!("failed"), &json!("agent_trapped")));
    assert_eq!(turn["message"]["text"], "!", "whoever looks for the reason sees what was said");
    let missing = server.get("/v1/agents/echo/sessions/s/turns/nothing").await;
    assert_eq!((missing.status.as_u16(), &missing.error()["code"]), (404, &json!("turn_not_found")));
}
