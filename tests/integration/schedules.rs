//! Alarms and events of a real host that is killed while they are in flight: each is delivered and counts
//! once.

use crate::{
    durability::Process,
    harness::{Host, client, guest, model_path},
};
use serde_json::{Value, json};
use std::time::Duration;

const KILLS: usize = 5;
const SESSIONS: usize = 4;
/// Number of alarms and events of each kind per session.
const EACH: usize = 12;
const MANIFEST: &str = "name = \"counted\"\n[grants]\nevents = [\"counted.*\"]\n\
    [[trigger.event]]\ntopic = \"counted.*\"\nsession = \"{data.session}\"\n";

/// Sends a request and returns the response, or `None` if no host is running.
async fn post(url: &str, path: &str, key: &str, body: &Value) -> Option<Value> {
    let request = client().post(format!("{url}{path}")).header("idempotency-key", key).json(body);
    let answer = request.send().await.ok()?;
    assert!(answer.status().is_success(), "{path}: {}", answer.status());
    answer.json().await.ok()
}

async fn get(url: &str, path: &str) -> Value {
    client().get(format!("{url}{path}")).send().await.unwrap().json().await.unwrap()
}

/// Returns the alarms and events that each session has received.
async fn taken(url: &str, probe: &mut usize) -> Vec<Value> {
    let mut all = Vec::new();
    for session in 0..SESSIONS {
        *probe += 1;
        let path = format!("/v1/agents/counted/sessions/s{session}/messages");
        let answer = post(url, &path, &format!("probe {probe}"), &json!({"text": "look"})).await;
        all.push(answer.expect("the host is running")["data"].clone());
    }
    all
}

fn sum(taken: &[Value]) -> usize {
    taken.iter().filter_map(Value::as_object).map(serde_json::Map::len).sum()
}

async fn until_over(url: &str) {
    let over = async {
        loop {
            let schedules = get(url, "/v1/schedules").await;
            let events = get(url, "/v1/events?limit=1000").await;
            let pending = |event: &Value| event["pending"] != json!(0);
            if schedules["data"].as_array().unwrap().is_empty()
                && !events["data"].as_array().unwrap().iter().any(pending)
            {
                return;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(120), over).await.expect("everything is delivered");
}

#[tokio::test(flavor = "multi_thread")]
async fn alarms_and_events_of_a_killed_host_count_once_each() {
    let data = tempfile::tempdir().unwrap();
    let (model, component) =
        tokio::task::spawn_blocking(|| (model_path(), guest("scheduled"))).await.unwrap();
    let mut process = Process::start(model, data.path());
    let host = Host::elsewhere(process.url.clone());
    assert_eq!(host.deploy(MANIFEST, component.to_vec()).await.0, 201);
    let mut probe = 0;
    for session in 0..SESSIONS {
        let path = format!("/v1/agents/counted/sessions/s{session}/messages");
        for command in ["set", "emit"] {
            let text = json!({"text": format!("{command} {EACH}")});
            post(&process.url, &path, command, &text).await.expect("the host is running");
        }
        for number in 0..EACH {
            let data = json!({"session": format!("s{session}"), "number": number});
            let event = json!({"topic": "counted.sent", "id": format!("{session}-{number}"), "data": data});
            for _twice in 0..2 {
                post(&process.url, "/v1/events", "", &event).await.expect("the host is running");
            }
        }
    }
    for kill in 1..=KILLS {
        // Wait for the next part of the deliveries, wherever the others are then.
        while sum(&taken(&process.url, &mut probe).await) < kill * SESSIONS * EACH * 3 / (KILLS + 1) {}
        process.kill();
        process = Process::start(model, data.path());
    }
    until_over(&process.url).await;
    for (session, taken) in taken(&process.url, &mut probe).await.iter().enumerate() {
        let taken = taken.as_object().expect("the received alarms and events, by name");
        assert_eq!(taken.len(), 3 * EACH, "session {session} misses some: {taken:?}");
        assert!(taken.values().all(|count| *count == 1), "session {session} received some twice: {taken:?}");
    }
    process.kill();
}
