//! A rate that two hosts keep together. How closely they keep it over time is tested in the gateway, with a clock that does not
//! depend on the machine.

use super::nodes::{Node, Site, until};
use crate::harness::client;
use reqwest::{Method, Response};
use serde_json::json;
use std::{fs::File, io::Write, time::Duration};

/// Requests that may be sent at once. Hardly any are added during the test.
const BURST: u32 = 200;
/// Time between two requests to a host that has not heard yet what the other one has admitted.
const PAUSE: Duration = Duration::from_millis(100);

async fn ask(node: &Node, key: &str) -> Response {
    let question = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 1});
    let request = client().post(format!("{}/v1/chat/completions", node.url)).bearer_auth(key);
    request.json(&question).send().await.unwrap()
}

fn remaining(answer: &Response) -> u32 {
    answer.headers()["x-ratelimit-remaining-requests"].to_str().unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_that_one_host_admits_count_at_the_other() {
    let Some(site) = Site::start(true).await else { return };
    let mut settings = File::options().append(true).open(site.path("skep.toml")).unwrap();
    write!(settings, "[tenants.acme]\nrequests_per_minute = 1\nrequest_burst = {BURST}\n").unwrap();
    let (a, b) = (site.node().await, site.node().await);
    let key = a.ok(Method::POST, "/v1/keys", json!({"tenant": "acme", "role": "invoke"})).await;
    let key = key["key"].as_str().unwrap();

    let half = BURST / 2;
    for _ in 0..half {
        assert_eq!(ask(&a, key).await.status(), 200);
    }
    // The other host does not know the key at once, and does not count what it refuses.
    until(async || ask(&b, key).await.status() == 200).await;
    let mut admitted = half + 1;
    loop {
        let answer = ask(&b, key).await;
        assert_eq!(answer.status(), 200, "it admits what is left");
        admitted += 1;
        if remaining(&answer) < BURST - half {
            break;
        }
        tokio::time::sleep(PAUSE).await;
    }
    let refused = loop {
        let answer = ask(&b, key).await;
        match answer.status().is_success() {
            true => admitted += 1,
            false => break answer,
        }
    };
    assert_eq!(refused.status(), 429);
    assert!((BURST * 95 / 100..=BURST * 105 / 100).contains(&admitted), "{admitted} instead of {BURST}");
    until(async || {
        tokio::time::sleep(PAUSE).await;
        ask(&a, key).await.status() == 429
    })
    .await;
}
