//! The console's files, signing in, and the routes that its pages use beside those for programs.

use super::{
    access::{guarded, key},
    fixture::{Server, TestResponse, tiny_experts},
    turns::echo,
};
use crate::{ConsoleOptions, GatewayOptions};
use axum::{
    body::{Body, to_bytes},
    http::{Method, Request},
};
use serde_json::{Value, json};
use skep_engine::{LoadProgress, LocalModel};
use skep_runtime::{Manifest, Role};
use tower::ServiceExt;

async fn ask(
    server: &Server,
    method: Method,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> TestResponse {
    let request =
        headers.iter().fold(Request::builder().method(method).uri(path), |request, (name, value)| {
            request.header(*name, *value)
        });
    server
        .send(request.header("content-type", "application/json").body(Body::from(body.to_owned())).unwrap())
        .await
}

async fn get(server: &Server, path: &str, headers: &[(&str, &str)]) -> TestResponse {
    ask(server, Method::GET, path, headers, "").await
}

/// Returns a page or a file, which the OpenAPI document does not describe.
async fn page(server: &Server, path: &str, headers: &[(&str, &str)]) -> TestResponse {
    let request =
        headers.iter().fold(Request::get(path), |request, (name, value)| request.header(*name, *value));
    let response = server.router.clone().oneshot(request.body(Body::empty()).unwrap()).await.unwrap();
    let (parts, body) = response.into_parts();
    let bytes = to_bytes(body, usize::MAX).await.unwrap();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    TestResponse { status: parts.status, headers: parts.headers, text }
}

#[tokio::test]
async fn every_address_is_the_page_and_files_are_files() {
    let server = guarded().await;
    let root = page(&server, "/", &[]).await;
    assert_eq!((root.status.as_u16(), root.headers["location"].to_str().unwrap()), (307, "/ui"));
    // A link on a page of another site may lead to the console.
    for path in ["/ui", "/ui/", "/ui/sessions/acme%2Fx/y", "/ui/turns"] {
        let shown = page(&server, path, &[("sec-fetch-site", "cross-site")]).await;
        assert_eq!(shown.status, 200, "{path}: {}", shown.text);
        assert!(shown.text.to_lowercase().contains("<!doctype html>"), "{path}");
        let policy = shown.headers["content-security-policy"].to_str().unwrap();
        assert!(policy.contains("script-src 'self'") && !policy.contains("unsafe"), "{policy}");
    }
    let script = page(&server, "/ui/app.js", &[]).await;
    assert_eq!(script.headers["content-type"], "text/javascript; charset=utf-8");
    let etag = script.headers["etag"].to_str().unwrap();
    assert_eq!(page(&server, "/ui/app.js", &[("if-none-match", etag)]).await.status, 304);
    let zipped = page(&server, "/ui/app.js", &[("accept-encoding", "br, gzip;q=0.5")]).await;
    assert_eq!(zipped.headers["content-encoding"], "gzip");
    let plain = page(&server, "/ui/app.js", &[("accept-encoding", "gzip;q=0")]).await;
    assert!(!plain.headers.contains_key("content-encoding"));
    for path in ["/ui/nothing.js", "/ui/../Cargo.toml", "/ui/%2e%2e/Cargo.toml"] {
        assert_eq!(page(&server, path, &[]).await.status, 404, "{path}");
    }
    let guides = page(&server, "/ui/guides/index.json", &[]).await.json();
    let console = guides.as_array().unwrap().iter().find(|guide| guide["id"] == "host/console");
    assert_eq!(console.unwrap()["title"], "The console");
    assert_eq!(page(&server, "/ui/guides/host/console.md", &[]).await.status, 200);
}

#[tokio::test]
async fn a_host_without_a_console_has_no_pages() {
    let options = GatewayOptions { console: ConsoleOptions::Off, ..GatewayOptions::default() };
    let server = Server::with(options).await;
    for path in ["/", "/ui", "/ui/app.js"] {
        assert_eq!(page(&server, path, &[]).await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn a_browser_signs_in_with_a_key_and_its_cookie_counts_only_for_the_console() {
    let server = guarded().await;
    let key = key(&server, "acme", Role::Read, None).await;
    let console = ("x-skep-console", "1");
    let body = json!({ "key": key }).to_string();
    let sign_in = async |headers: &[(&str, &str)], body: &str| {
        ask(&server, Method::POST, "/ui/session", headers, body).await
    };
    assert_eq!(sign_in(&[], &body).await.status, 400, "only the console signs in");
    assert_eq!(sign_in(&[console], r#"{"key": "skep_wrong"}"#).await.status, 401);
    let signed_in = sign_in(&[console], &body).await;
    assert_eq!(signed_in.status, 204, "{}", signed_in.text);
    let cookie = signed_in.headers["set-cookie"].to_str().unwrap();
    assert!(cookie.contains("HttpOnly") && cookie.contains("SameSite=Strict"), "{cookie}");
    let cookie = ("cookie", cookie.split(';').next().unwrap());
    assert_eq!(get(&server, "/v1/caller", &[cookie]).await.status, 401);
    let caller = get(&server, "/v1/caller", &[cookie, console]).await.json();
    assert_eq!((&caller["tenant"], &caller["role"]), (&json!("acme"), &json!("read")), "{caller}");
    assert_eq!(get(&server, "/v1/status", &[cookie, console]).await.status, 403);
    let signed_out = ask(&server, Method::DELETE, "/ui/session", &[cookie, console], "").await;
    assert!(signed_out.headers["set-cookie"].to_str().unwrap().contains("Max-Age=0"));
}

#[tokio::test]
async fn sessions_turns_and_state_are_listed_for_those_who_may_see_them() {
    let server = guarded().await;
    let acme = key(&server, "acme", Role::Invoke, None).await;
    let narrow = key(&server, "acme", Role::Invoke, Some("other")).await;
    let zenith = key(&server, "zenith", Role::Read, None).await;
    let admin = key(&server, "local", Role::Admin, None).await;
    let bearer = |key: &str| format!("Bearer {key}");
    for (agent, session) in [("echo", "one"), ("other", "two")] {
        let path = format!("/v1/agents/{agent}/sessions/{session}/messages");
        let sent =
            ask(&server, Method::POST, &path, &[("authorization", &bearer(&acme))], r#"{"text":"hi"}"#).await;
        assert_eq!(sent.status, 200, "{}", sent.text);
    }
    let list = async |key: &str, query: &str| {
        let answer = get(&server, &format!("/v1/sessions{query}"), &[("authorization", &bearer(key))]).await;
        assert_eq!(answer.status, 200, "{}", answer.text);
        let sessions = answer.json()["data"].take();
        let ids =
            sessions.as_array().unwrap().iter().map(|session| session["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    let mut seen = list(&acme, "").await;
    seen.sort();
    assert_eq!(seen, ["one", "two"]);
    assert_eq!(list(&acme, "?agent=echo").await, ["one"]);
    assert_eq!(list(&acme, "?search=tw").await, ["two"]);
    assert_eq!(list(&narrow, "").await, ["two"]);
    assert!(list(&zenith, "").await.is_empty());
    assert_eq!(list(&admin, "").await.len(), 2);
    assert_eq!(list(&admin, "?tenant=acme&search=one").await, ["acme/one"]);
    assert!(list(&admin, "?tenant=local").await.is_empty());
    for query in ["?agent=echo", "?before=x", "?limit=0", "?tenant=zenith"] {
        let answer =
            get(&server, &format!("/v1/sessions{query}"), &[("authorization", &bearer(&narrow))]).await;
        assert!([400, 403].contains(&answer.status.as_u16()), "{query}: {}", answer.text);
    }
    let of_acme = "/v1/agents/echo/sessions/one";
    let turns = get(&server, &format!("{of_acme}/turns"), &[("authorization", &bearer(&acme))]).await.json();
    assert_eq!(
        (&turns["data"][0]["state"], &turns["data"][0]["turn"]),
        (&json!("done"), &json!(1)),
        "{turns}"
    );
    let timeline = format!("{of_acme}/turns/{}/timeline", turns["data"][0]["turn_id"].as_str().unwrap());
    let shown = get(&server, &timeline, &[("authorization", &bearer(&acme))]).await.json();
    assert!(shown["started_at_ms"].is_u64() && shown["returned_us"].is_u64(), "{shown}");
    assert!(shown["commit_us"].as_u64() > Some(0), "{shown}");
    let limits = shown["limits"].as_array().unwrap();
    let limit = |name: &str| limits.iter().find(|limit| limit["name"] == name).expect(name);
    for name in ["turn_ms", "cpu_ms", "memory_mb"] {
        assert!(
            (1..=limit(name)["limit"].as_u64().unwrap()).contains(&limit(name)["used"].as_u64().unwrap())
        );
    }
    assert_eq!((&limit("fetches")["used"], limits.len()), (&json!(0), 10), "{shown}");
    let agent = async |key| get(&server, "/v1/agents/echo", &[("authorization", &bearer(key))]).await.json();
    let recent = agent(&admin).await["recent_turns"].take();
    assert_eq!((&recent["turns"], &recent["highest"]), (&json!(1), &recent["latest"]), "{recent}");
    assert_eq!(recent["latest"]["cpu_ms"], limit("cpu_ms")["used"], "{recent}");
    assert!(agent(&acme).await["recent_turns"].is_null(), "only an admin sees what all tenants use");
    let usage = &turns["data"][0]["usage"];
    assert!(usage["completion_tokens"].is_u64(), "{turns}");
    assert_eq!(get(&server, &timeline, &[("authorization", &bearer(&zenith))]).await.status, 404);
    let state = get(&server, &format!("{of_acme}/state"), &[("authorization", &bearer(&acme))]).await;
    assert_eq!(state.status, 200, "{}", state.text);
    let none =
        get(&server, "/v1/agents/echo/sessions/none/state", &[("authorization", &bearer(&acme))]).await;
    assert_eq!(none.error()["code"], "session_not_found");
}

#[tokio::test]
async fn a_schema_is_checked_without_generating() {
    let server = Server::start().await;
    let check = async |schema| server.ok("/v1/schemas/check", &json!({ "schema": schema })).await.json();
    let accepted = check(json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true})).await;
    assert_eq!(
        (&accepted["enforced"], &accepted["notes"][0]["kind"]),
        (&json!(true), &json!("checked")),
        "{accepted}"
    );
    let refused = check(json!({"type": "strin"})).await;
    assert_eq!(refused["enforced"], false);
    assert!(refused["error"]["message"].as_str().unwrap().contains("/type"), "{refused}");
    let unknown = server.post("/v1/schemas/check", &json!({"schema": {}, "model": "none"})).await;
    assert_eq!(unknown.error()["code"], "model_not_found");
}

#[tokio::test]
async fn owners_of_pages_are_counted_and_figures_are_bounded() {
    let server = Server::start().await;
    let manifest = Manifest::from_toml("name = \"echo\"").unwrap();
    server.host.deploy(manifest, echo(), "tester").await.unwrap();
    let body = json!({"messages": [{"role": "user", "content": "x ".repeat(64)}], "max_tokens": 1});
    server.ok("/v1/chat/completions", &body).await;
    let pages = server.get("/v1/engine/pages").await.json();
    let owned: u64 =
        pages["owners"].as_array().unwrap().iter().map(|owner| owner["pages"].as_u64().unwrap()).sum();
    assert_eq!(owned + pages["free"].as_u64().unwrap(), pages["total"].as_u64().unwrap(), "{pages}");
    assert!(owned > 0, "{pages}");
    assert_eq!(server.get("/v1/engine/pages?model=none").await.error()["code"], "model_not_found");
    assert_eq!(server.get("/v1/engine?seconds=1").await.json()["object"], "engine");
    for seconds in ["0", "3601"] {
        assert_eq!(server.get(&format!("/v1/engine?seconds={seconds}")).await.status, 400);
    }
}

#[tokio::test]
async fn the_work_of_experts_and_ranks_is_counted() {
    let experts = LocalModel::new("experts", "cpu", |_: &LoadProgress| Ok(tiny_experts(2)));
    let server = Server::with_models(vec![experts]).await;
    assert_eq!(server.get("/v1/engine/load?model=experts").await.error()["code"], "model_not_found");
    server.ok("/v1/models", &json!({"model": "experts", "action": "load", "wait": true})).await;
    let load = async || server.get("/v1/engine/load?model=experts").await.json();
    let sums = |load: &Value| -> Vec<u64> {
        let tokens = |layer: &Value| layer["tokens"].as_array().unwrap().clone();
        let sum = |layer: &Value| tokens(layer).iter().map(|count| count.as_u64().unwrap()).sum::<u64>();
        load["experts"].as_array().unwrap().iter().map(sum).collect()
    };
    let before = sums(&load().await);
    assert_eq!(before.len(), 3, "the model has three layers");
    let body = json!({"model": "experts", "prompt": "a hive", "max_tokens": 4, "ignore_eos": true});
    for _ in 0..2 {
        server.ok("/v1/completions", &body).await;
    }
    let after = load().await;
    assert_eq!(after["experts"][2]["tokens"].as_array().unwrap().len(), 8, "{after}");
    let counted = sums(&after);
    // Each token passes through two experts of each layer, and the two ranks of a replica do not both count it.
    assert!(counted.iter().all(|sum| *sum == counted[0] && sum.is_multiple_of(2)), "{after}");
    assert!(counted[0] >= before[0] + 2 * (6 + 3), "{before:?} {after}");
    let ranks = after["ranks"].as_array().unwrap();
    let place = |rank: &Value| ["replica", "stage", "shard"].map(|index| rank[index].as_u64().unwrap());
    let places: Vec<_> = ranks.iter().map(place).collect();
    assert_eq!(places, [[0, 0, 0], [0, 0, 1], [1, 0, 0], [1, 0, 1]]);
    assert!(ranks.iter().any(|rank| rank["steps"].as_u64() > Some(0)), "{after}");
    let dense = server.get("/v1/engine/load?model=tiny").await.json();
    assert_eq!((&dense["experts"], &dense["ranks"]), (&json!([]), &json!([])), "{dense}");
}
