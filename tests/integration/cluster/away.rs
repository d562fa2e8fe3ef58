//! Generations while the database is away.

use super::nodes::{Node, Site, until};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};

fn question() -> Value {
    let messages = json!([{"role": "user", "content": "What is gravity?"}]);
    json!({"model": "tiny", "messages": messages, "max_tokens": 4, "temperature": 0})
}

async fn ready(node: &Node) -> bool {
    node.get("/readyz").await.0 == 200
}

/// Returns the status of a generation that is asked for with this key.
async fn generated(node: &Node, key: &str) -> StatusCode {
    let url = format!("{}/v1/chat/completions", node.url);
    crate::harness::client().post(url).bearer_auth(key).json(&question()).send().await.unwrap().status()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn generations_without_a_session_continue_while_the_database_is_away() {
    let Some(site) = Site::start(true).await else { return };
    let (computing, gateway) = (site.node().await, site.gateway().await);
    let created = computing.ok(Method::POST, "/v1/keys", json!({"tenant": "acme", "role": "invoke"})).await;
    let (id, key) = (created["id"].as_str().unwrap(), created["key"].as_str().unwrap());
    let nodes = [&computing, &gateway];
    for node in nodes {
        until(async || generated(node, key).await == 200).await;
    }
    site.server.stop();
    for node in nodes {
        until(async || !ready(node).await).await;
        assert_eq!(generated(node, key).await, 200, "it needs no database");
    }
    site.server.start_again();
    for node in nodes {
        until(async || ready(node).await).await;
        assert_eq!(generated(node, key).await, 200);
    }
    // A key that is revoked now is refused as always.
    computing.ok(Method::DELETE, &format!("/v1/keys/{id}"), Value::Null).await;
    for node in nodes {
        until(async || generated(node, key).await == 401).await;
    }
}
