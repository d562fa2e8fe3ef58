//! Prefill apart from decode, with processes: a decode host answers with the same tokens whether a prefill host computes its prompts
//! or fails to, and a balancer in front of decode hosts loses no request when one of them is killed.

use super::{
    nodes::{Node, Site, answered_by, until},
    pages::ATTEMPTS,
};
use crate::{durability::tiny_model_of, harness::parse_events};
use reqwest::Method;
use serde_json::{Value, json};

/// Prepares hosts that have prompts of 64 tokens and more computed elsewhere. The pages of a prompt are taken in any case, because other
/// work may make this machine slower at one of the two.
pub async fn site() -> Option<Site> {
    let site = Site::start(false).await?;
    let path = site.path("skep.toml");
    let settings = std::fs::read_to_string(&path).unwrap();
    let settings = settings.replace("[cluster]\n", "[cluster]\nprefill_tokens = 64\n");
    std::fs::write(&path, settings + "[kv]\ndisk_free_percent = 0\nalways_read = true\n").unwrap();
    Some(site)
}

/// Returns a question of about a thousand tokens, whose first page is that of no other number.
fn question(number: usize) -> Value {
    let rules = (1..32).map(|rule| format!("Rule {rule}: {} kg go to {}. ", rule * 3 % 17, rule % 7));
    let messages = json!([
        {"role": "system", "content": format!("{number} is the list. {}", rules.collect::<String>())},
        {"role": "user", "content": "Where does a parcel of 9 kg go?"},
    ]);
    json!({"messages": messages, "temperature": 0, "max_tokens": 16})
}

/// Asks a question, and returns the text and the usage of the answer.
pub async fn chat(node: &Node, number: usize) -> (String, Value) {
    let mut answer = node.ok(Method::POST, "/v1/chat/completions", question(number)).await;
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap_or_default().to_owned();
    (text, answer["usage"].take())
}

/// Does the same with a streamed answer.
async fn streamed(node: &Node, number: usize) -> (String, Value, u64) {
    let mut body = question(number);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    let response = node.request(Method::POST, "/v1/chat/completions").json(&body).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let host = answered_by(&response);
    let (mut text, mut usage) = (String::new(), Value::Null);
    for (_, data) in parse_events(&response.text().await.unwrap()) {
        let Ok(mut chunk) = serde_json::from_str::<Value>(&data) else { continue };
        text += chunk["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
        if chunk["usage"].is_object() {
            usage = chunk["usage"].take();
        }
    }
    (text, usage, host)
}

/// Returns the tokens of the prompt, how many a prefill host has computed, and how many were cached.
pub fn prompt_tokens(usage: &Value) -> (u64, u64, u64) {
    let details = &usage["prompt_tokens_details"];
    let count = |value: &Value| value.as_u64().unwrap_or_default();
    (count(&usage["prompt_tokens"]), count(&details["prefilled_tokens"]), count(&details["cached_tokens"]))
}

pub async fn used(node: &Node) -> u64 {
    node.metric("skep_cluster_prefills_total", "outcome=\"used\"").await
}

/// Waits until a host knows another one that has started.
pub async fn knows(node: &Node, other: &Node, role: &str) {
    until(async || {
        let listed = node.get("/v1/cluster").await.1;
        let hosts = listed["hosts"].as_array().cloned().unwrap_or_default();
        hosts.iter().any(|host| host["number"] == other.number && host["role"] == role)
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_prompts_are_computed_by_a_prefill_host_with_the_same_tokens() {
    let Some(site) = site().await else { return };
    let decode = site.node_as("decode", None, &[]).await;
    // A host that computes all of them itself, because there is no prefill host.
    let mut expected = Vec::new();
    for number in 0..9 {
        let (text, usage) = chat(&decode, number).await;
        let (prompt, prefilled, _) = prompt_tokens(&usage);
        assert!(prompt > 500 && prefilled == 0, "{usage}");
        expected.push(text);
    }
    let forget = async || decode.ok(Method::DELETE, "/v1/kv", Value::Null).await;
    forget().await;

    // A busy machine may delay an order until the decode host computes the prompt itself and lets the prefill host rest, which is
    // right. Another prefill host is then asked for the same prompts.
    let mut attempt = 1;
    let prefill = loop {
        // It gives pages without a disk.
        let prefill = site.node_as("prefill", None, &["--kv-disk-gb", "0"]).await;
        knows(&decode, &prefill, "prefill").await;
        let before = used(&decode).await;
        let (whole, usage_of_whole) = chat(&decode, 0).await;
        let (pieces, usage_of_pieces, _) = streamed(&decode, 1).await;
        assert_eq!([&whole, &pieces], [&expected[0], &expected[1]]);
        let orders = used(&decode).await - before;
        if orders < 2 && attempt < ATTEMPTS {
            eprintln!("orders ended too late: {usage_of_whole} {usage_of_pieces}");
            prefill.kill();
            forget().await;
            attempt += 1;
            continue;
        }
        for usage in [usage_of_whole, usage_of_pieces] {
            let (prompt, prefilled, cached) = prompt_tokens(&usage);
            assert_eq!((prefilled, cached), ((prompt - 1) / 16 * 16, 0), "{usage}");
        }
        assert_eq!(orders, 2);
        break prefill;
    };
    let before = used(&decode).await;
    // The prompt is in memory now, so the same question is not ordered again.
    let (text, usage) = chat(&decode, 1).await;
    assert_eq!((text.as_str(), prompt_tokens(&usage).1), (expected[1].as_str(), 0), "{usage}");
    assert_eq!(used(&decode).await, before);
    let served = prefill.metric("skep_cluster_prefills_served_total", "outcome=\"accepted\"").await;
    assert_eq!(
        (served, prefill.metric("skep_cluster_prefill_served_tokens_total", "").await > 1_000),
        (2, true)
    );
    assert_eq!(prefill.get("/v1/models").await.0, 421, "it answers no clients");
    until(async || prefill.metric("skep_cluster_prefill_tokens_in_flight", "").await == 0).await;

    // It is killed while prompts may be on their way.
    let asked = tokio::join!(chat(&decode, 2), chat(&decode, 3), chat(&decode, 4), async { prefill.kill() });
    for (number, (text, _)) in (2..).zip([asked.0, asked.1, asked.2]) {
        assert_eq!(text, expected[number]);
    }
    // It is gone before the next one.
    let before = used(&decode).await;
    assert_eq!(chat(&decode, 5).await.0, expected[5]);

    // A host that is stopped says nothing, and its prompt is computed here. It counts as another host, which was not asked before.
    let stopped = site.node_as("prefill", None, &["--kv-disk-gb", "0"]).await;
    knows(&decode, &stopped, "prefill").await;
    stopped.signal("-STOP");
    let (text, usage) = chat(&decode, 6).await;
    assert_eq!((text.as_str(), prompt_tokens(&usage).1), (expected[6].as_str(), 0), "{usage}");
    assert_eq!(used(&decode).await, before);
    stopped.kill();

    // A host with other weights under the name of the model refuses.
    let other = tempfile::tempdir().unwrap();
    tiny_model_of("qwen3-moe", other.path());
    let mismatched = site.node_as("prefill", Some(other.path()), &[]).await;
    knows(&decode, &mismatched, "prefill").await;
    let (text, usage) = chat(&decode, 7).await;
    assert_eq!((text.as_str(), prompt_tokens(&usage).1), (expected[7].as_str(), 0), "{usage}");
    assert_eq!(decode.metric("skep_cluster_prefills_total", "outcome=\"refused\"").await, 1);
    assert_eq!(used(&decode).await, before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_balancer_loses_no_request_when_a_decode_host_is_killed() {
    let Some(site) = site().await else { return };
    let one = site.node_as("decode", None, &[]).await;
    let two = site.node_as("decode", None, &[]).await;
    let balancer = site.node_as("balancer", None, &[]).await;
    knows(&balancer, &one, "decode").await;
    knows(&balancer, &two, "decode").await;
    assert_eq!(balancer.get("/healthz").await.2, balancer.number, "it answers what is about itself");
    let (expected, _) = chat(&one, 0).await;
    let (text, usage, host) = streamed(&balancer, 0).await;
    assert_eq!(text, expected);
    assert!(prompt_tokens(&usage).0 > 500 && [one.number, two.number].contains(&host), "{host}");

    // A session stays at its host, whoever is asked.
    one.deploy("state", "state", "").await;
    two.knows(&["state"]).await;
    let (_, owner) = one.say("state/sessions/kept", "increment n").await;
    assert_eq!(owner, one.number);
    let (answer, owner) = balancer.say("state/sessions/kept", "increment n").await;
    assert_eq!((&answer["text"], owner), (&json!("2"), one.number));
    let (answer, owner) = balancer.say("state/sessions/new", "increment n").await;
    assert!(answer["text"] == "1" && owner != balancer.number, "{answer}");

    // Requests that nobody has got yet go to the other host, and the session is taken over.
    let left = two.number;
    one.kill();
    for _ in 0..8 {
        let (status, answer, host) = balancer.ask(Method::POST, "/v1/chat/completions", question(0)).await;
        assert_eq!((status, host), (200, left), "{answer}");
        assert_eq!(answer["choices"][0]["message"]["content"], expected.as_str());
    }
    let (answer, owner) = balancer.say("state/sessions/kept", "get n").await;
    assert_eq!((&answer["text"], owner), (&json!("2"), left));
}
