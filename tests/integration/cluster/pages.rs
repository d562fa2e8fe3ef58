//! KV pages that hosts give each other: a prompt that one host has computed is not computed again by another one, and a session
//! that moves while its last host still answers takes its pages with it.

use super::{
    gate::Gate,
    nodes::{Node, Site, until},
};
use reqwest::Method;
use serde_json::{Value, json};
use std::{fs::OpenOptions, io::Write};

/// Returns a text of about 1,500 tokens.
pub fn long_text() -> String {
    (1..32)
        .map(|rule| format!("Rule {rule}: a parcel of {} kg goes to {}. ", rule * 3 % 17, rule % 7))
        .collect()
}

pub async fn kv(node: &Node) -> Value {
    node.ok(Method::GET, "/v1/kv", Value::Null).await
}

/// Waits until at least this many pages are on a host's disk and nothing waits.
pub async fn written(node: &Node, pages: u64) {
    until(async || {
        let status = kv(node).await;
        status["pages"].as_u64() >= Some(pages) && status["queued_bytes"] == 0
    })
    .await;
}

pub async fn chat(node: &Node, messages: &Value) -> Value {
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 16});
    node.ok(Method::POST, "/v1/chat/completions", body).await
}

async fn say(node: &Node, text: &str) -> (Value, u64) {
    let body = json!({"text": text, "data": {"max_tokens": 16, "temperature": 0}});
    let (status, answer, host) = node.ask(Method::POST, "/v1/agents/clerk/sessions/ada/messages", body).await;
    assert_eq!(status, 200, "{answer}");
    (answer, host)
}

/// Returns the number of tokens of a prompt, and how many of them were not computed.
pub fn prompt_tokens(answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    (usage["prompt_tokens"].as_u64().unwrap(), cached.as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_one_host_has_computed_another_one_fetches() {
    let Some(site) = Site::start(false).await else { return };
    // The disk of a test may be full, and other work may make it slower than computing.
    let mut settings = OpenOptions::new().append(true).open(site.path("skep.toml")).unwrap();
    settings.write_all(b"[kv]\ndisk_free_percent = 0\nalways_read = true\n").unwrap();
    let (a, b) = (site.node().await, site.node().await);
    a.deploy("generate", "clerk", "").await;
    a.deploy("gate", "gate", "[grants]\nhosts = [\"*\"]").await;
    b.knows(&["clerk", "gate"]).await;

    // A chat that begins as one at the other host.
    let question =
        |text: &str| json!([{"role": "system", "content": long_text()}, {"role": "user", "content": text}]);
    let first = chat(&a, &question("Where does a parcel of 9 kg go?")).await;
    let (prompt, cached) = prompt_tokens(&first);
    assert!(prompt > 1_000 && cached == 0, "{first}");
    written(&a, prompt / 16).await;
    let other = question("And one of 12 kg?");
    let at_b = chat(&b, &other).await;
    let (prompt, cached) = prompt_tokens(&at_b);
    assert!(cached + 96 > prompt, "{cached} of {prompt} tokens were cached: {}", kv(&b).await);
    let at_a = chat(&a, &other).await;
    assert_eq!(at_a["choices"][0]["message"], at_b["choices"][0]["message"]);
    let (given, fetched) = (kv(&a).await, kv(&b).await);
    assert_eq!(fetched["peers"]["fetched_pages"].as_u64(), Some(cached / 16), "{fetched}");
    assert_eq!(fetched["peers"]["lane"], "http", "nobody named a library");
    assert_eq!(given["peers"]["given_pages"], fetched["peers"]["fetched_pages"], "{given}");
    assert_eq!((&fetched["peers"]["questions"], &fetched["read_pages"]), (&json!(1), &json!(0)), "{fetched}");

    a_session_moves_with_its_pages(a, &b).await;
}

async fn a_session_moves_with_its_pages(a: Node, b: &Node) {
    let gate = Gate::start().await;
    let before = kv(&a).await["pages"].as_u64().unwrap();
    let (first, owner) = say(&a, &format!("{} Where does a parcel of 12 kg go?", long_text())).await;
    assert_eq!(owner, a.number);
    let (prompt, _) = prompt_tokens(&first);
    written(&a, before + prompt / 16 - 4).await;
    // The host drains, and has a turn that keeps it from ending.
    let (_, owner) = a.begin("gate/sessions/held", &gate.url).await;
    assert_eq!(owner, a.number);
    gate.has(1).await;
    let drain = format!("/v1/cluster/hosts/{}/drain", a.number);
    b.ok(Method::POST, &drain, Value::Null).await;
    let drains = async || {
        let known = b.get("/v1/cluster").await.1;
        let hosts = known["hosts"].as_array().unwrap();
        hosts.iter().any(|host| host["number"] == a.number && host["state"] == "draining")
    };
    until(drains).await;
    let (second, owner) = say(b, "And one of 20 kg?").await;
    assert_eq!(owner, b.number);
    let (prompt, cached) = prompt_tokens(&second);
    assert!(
        cached > 1_000 && cached + 96 > prompt,
        "{cached} of {prompt} tokens were cached: {}",
        kv(b).await
    );
    gate.open();
    let (status, log) = a.exited().await;
    assert_eq!(status, Some(0), "{log}");
    // Nobody has the pages of the next prompt, and it is answered all the same.
    let alone = json!([{"role": "user", "content": format!("Nobody has this. {}", long_text())}]);
    assert_eq!(prompt_tokens(&chat(b, &alone).await).1, 0);
}
