//! A backup of a host under load, the end of that host, and the state, deliveries and replies of the restored
//! host.

use crate::{
    durability::{Process, tiny_model},
    harness::{Host, client},
};
use axum::{
    Router,
    body::Bytes,
    extract::State,
    http::{HeaderMap, StatusCode},
    routing::post,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    path::Path,
    process::Command,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

const MANIFEST: &str = "name = \"counted\"\n[grants]\nevents = [\"counted.*\"]\n\
    [[trigger.event]]\ntopic = \"counted.session\"\nsession = \"{data.session}\"\n";
/// The call that the agent `payer` makes after approval.
const PAYMENT: &str = "agent:bank/pay {\"cents\": 5}";
const PATIENCE: Duration = Duration::from_secs(120);
/// Delay of alarms that are set before a backup and due after it, unless the machine is very slow.
const ALARM_AFTER: Duration = Duration::from_secs(15);

/// A receiver of webhooks, outside of every host.
#[derive(Clone, Default)]
struct Receiver {
    /// Accepted messages by id, with the `restored` flag of each delivery.
    taken: Arc<Mutex<BTreeMap<String, Vec<bool>>>>,
    refuses: Arc<AtomicBool>,
}

impl Receiver {
    async fn start() -> (Receiver, String) {
        let receiver = Receiver::default();
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/hook", listener.local_addr().unwrap());
        let router = Router::new().route("/hook", post(take)).with_state(receiver.clone());
        tokio::spawn(async move { axum::serve(listener, router).await });
        (receiver, url)
    }

    fn taken(&self) -> BTreeMap<String, Vec<bool>> {
        self.taken.lock().unwrap().clone()
    }
}

async fn take(State(receiver): State<Receiver>, headers: HeaderMap, body: Bytes) -> StatusCode {
    if receiver.refuses.load(Ordering::Relaxed) {
        return StatusCode::SERVICE_UNAVAILABLE;
    }
    let id = headers["webhook-id"].to_str().unwrap().to_owned();
    let body: Value = serde_json::from_slice(&body).unwrap();
    receiver.taken.lock().unwrap().entry(id).or_default().push(body["restored"] == true);
    StatusCode::OK
}

/// Waits until a condition holds.
async fn until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let over = async {
        while !holds().await {
            tokio::time::sleep(Duration::from_millis(20)).await
        }
    };
    tokio::time::timeout(PATIENCE, over).await.unwrap_or_else(|_| panic!("not in time: {what}"));
}

async fn skep(arguments: &[&str]) -> (bool, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(arguments).env("NO_COLOR", "1").stdin(std::process::Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).unwrap())
}

async fn started(model: &Path, data: &Path, config: &Path) -> (Process, Host) {
    let (model, data, config) = (model.to_owned(), data.to_owned(), config.to_owned());
    let process =
        tokio::task::spawn_blocking(move || Process::configured(&config, &model, &data)).await.unwrap();
    let host = Host::elsewhere(process.url.clone());
    (process, host)
}

/// Sends a message with an idempotency key and returns its turn, or `None` if the host is down.
async fn keyed(url: &str, session: &str, key: &str, text: &str) -> Option<(u16, Value)> {
    let path = format!("{url}/v1/agents/counted/sessions/{session}/messages");
    let answer =
        client().post(path).header("idempotency-key", key).json(&json!({"text": text})).send().await.ok()?;
    let status = answer.status().as_u16();
    Some((status, answer.json().await.ok()?))
}

async fn event(host: &Host, number: usize) {
    let data = json!({"session": "events", "number": number});
    let (status, answer) = host
        .post("/v1/events", json!({"topic": "counted.sent", "id": number.to_string(), "data": data}))
        .await;
    assert!((200..300).contains(&status), "{answer}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_backup_under_load_contains_acknowledged_work_and_marks_redeliveries() {
    let folder = tempfile::tempdir().unwrap();
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let at = |name: &str| folder.path().join(name);
    let config = at("skep.toml");
    std::fs::write(
        &config,
        "[outbound]\nallow_private = [\"127.0.0.0/8\"]\n[grants]\ntools = [\"agent:*/*\"]\n",
    )
    .unwrap();
    let (receiver, hook) = Receiver::start().await;
    let (process, host) = started(model.path(), &at("data"), &config).await;
    for (guest, name, manifest) in [
        ("scheduled", "counted", MANIFEST),
        ("toolcall", "bank", "name = \"bank\"\n"),
        ("relay", "payer", "name = \"payer\"\n[grants]\ntools = [\"agent:bank/pay\"]\n"),
    ] {
        let manifest = manifest.split_once('\n').unwrap().1;
        let (status, answer) = host.deploy_guest(guest, name, manifest).await;
        assert_eq!(status, 201, "{answer}");
    }
    let (status, answer) = host.post("/v1/webhooks", json!({"url": hook, "topics": ["counted.*"]})).await;
    assert!((200..300).contains(&status), "{answer}");

    // These are delivered before the backup.
    for number in 0..3 {
        event(&host, number).await;
    }
    until("three messages", async || receiver.taken().len() == 3).await;
    // These are in flight at the time of the backup.
    receiver.refuses.store(true, Ordering::Relaxed);
    for number in 3..6 {
        event(&host, number).await;
    }
    let (status, accepted) =
        host.post("/v1/agents/payer/sessions/held/messages?detach=true", json!({"text": PAYMENT})).await;
    assert_eq!(status, 202, "{accepted}");
    let payment = accepted["turn_id"].as_str().unwrap().to_owned();
    until("a question", async || host.get("/v1/approvals").await.1["data"][0]["id"].is_string()).await;

    // In the meantime, other clients continue.
    let (ends, acknowledged) = (Arc::new(AtomicBool::new(false)), Arc::new(Mutex::new(Vec::new())));
    let load: Vec<_> = (0..3)
        .map(|client| {
            let (url, ends, acknowledged) = (host.url.clone(), ends.clone(), acknowledged.clone());
            tokio::spawn(async move {
                let mut number = 0;
                while !ends.load(Ordering::Relaxed) {
                    number += 1;
                    let key = format!("{client}-{number}");
                    if let Some((status, turn)) = keyed(&url, &format!("load{client}"), &key, "look").await {
                        assert_eq!(status, 200, "{turn}");
                        acknowledged.lock().unwrap().push((client, key, turn));
                    }
                }
            })
        })
        .collect();
    until("a load", async || acknowledged.lock().unwrap().len() >= 30).await;
    let before = acknowledged.lock().unwrap().clone();
    let alarms_set_at = Instant::now();
    let set = format!("set 3 {}", ALARM_AFTER.as_millis());
    let (status, set) = keyed(&host.url, "alarms", "set", &set).await.unwrap();
    assert_eq!(status, 200, "{set}");
    let (data, backup) = (at("data"), at("backup"));
    let (done, said) = skep(&["backup", backup.to_str().unwrap(), "--data", data.to_str().unwrap()]).await;
    assert!(done, "{said}");
    assert!(
        said.contains("3 agents") && said.contains(" open turn") && said.contains(", 3 undelivered events"),
        "{said}"
    );
    let is_before_alarms = alarms_set_at.elapsed() < ALARM_AFTER;
    let during = acknowledged.lock().unwrap().len();
    until("a load that went on", async || acknowledged.lock().unwrap().len() > during + 5).await;

    // These are delivered after the backup.
    receiver.refuses.store(false, Ordering::Relaxed);
    until("six messages", async || receiver.taken().len() == 6).await;
    ends.store(true, Ordering::Relaxed);
    process.kill();
    for client in load {
        client.await.expect("every answer succeeded");
    }
    let delivered = receiver.taken();

    tokio::time::sleep((ALARM_AFTER + Duration::from_secs(1)).saturating_sub(alarms_set_at.elapsed())).await;
    let restored = at("restored");
    let (done, said) =
        skep(&["restore", backup.to_str().unwrap(), "--data", restored.to_str().unwrap()]).await;
    assert!(done && said.contains(", 3 events"), "{said}");
    let (process, host) = started(model.path(), &restored, &config).await;
    for (client, key, turn) in &before {
        let (status, again) = keyed(&host.url, &format!("load{client}"), key, "look").await.unwrap();
        assert_eq!(
            (status, &again["turn_id"], &again["turn"]),
            (200, &turn["turn_id"], &turn["turn"]),
            "{key}"
        );
        assert_eq!(again["data"], turn["data"], "{key}");
    }
    // Held messages would arrive before new ones, if they arrived at all.
    event(&host, 6).await;
    until("a new message", async || receiver.taken().len() == 7).await;
    let (_, held) = host.get("/v1/held").await;
    assert_eq!((&held["deliveries"], &held["is_restored"]), (&json!(3), &json!(true)));
    // The payment, and messages of the load that were in flight.
    let turns = held["turns"].as_u64().unwrap();
    assert!((1..=4).contains(&turns), "{held}");
    if is_before_alarms {
        assert_eq!(held["schedules"], 3, "{held}");
    }
    for (id, times) in &delivered {
        assert_eq!(&receiver.taken()[id], times, "nothing is redelivered automatically");
    }
    let (status, refused) = host.message("payer", "held", PAYMENT).await;
    assert_eq!((status, &refused["error"]["code"]), (409, &json!("held_since_restore")), "{refused}");
    let turn = format!("/v1/agents/payer/sessions/held/turns/{payment}");
    assert_eq!(host.delete(&turn).await.1["error"]["code"], "held_since_restore");

    let (done, said) = skep(&["held", "resume", "--url", &host.url]).await;
    let ending = if turns == 1 { "" } else { "s" };
    assert!(done && said.contains(&format!("resumed {turns} turn{ending}, 3 events")), "{said}");
    until("the rest", async || receiver.taken().values().map(Vec::len).sum::<usize>() == 10).await;
    for (id, times) in receiver.taken() {
        let told = times.iter().filter(|restored| **restored).count();
        assert_eq!(times.len() - told, 1, "{id} was redelivered without the flag: {times:?}");
    }
    let (_, approvals) = host.get("/v1/approvals").await;
    let approval = format!("/v1/approvals/{}", approvals["data"][0]["id"].as_str().unwrap());
    host.ok(&approval, json!({"decision": "approve"})).await;
    until("the payment", async || host.get(&turn).await.1["state"] == "done").await;
    let alarms = async || {
        let (_, looked) = keyed(&host.url, "alarms", &uuid(), "look").await.unwrap();
        looked["data"].as_object().cloned().unwrap_or_default()
    };
    until("three alarms", async || alarms().await.len() == 3).await;
    assert!(alarms().await.values().all(|times| times == 1));
    let (done, said) = skep(&["held", "drop", "--url", &host.url]).await;
    assert!(!done && said.contains("nothing is held"), "{said}");
    process.kill();

    // Now drop the held work instead.
    let dropped = at("dropped");
    let (done, said) =
        skep(&["restore", backup.to_str().unwrap(), "--data", dropped.to_str().unwrap()]).await;
    assert!(done, "{said}");
    let (process, host) = started(model.path(), &dropped, &config).await;
    let (done, said) = skep(&["held", "drop", "--url", &host.url]).await;
    assert!(done && said.contains(&format!("dropped {turns} turn{ending}, 3 events")), "{said}");
    let (_, failed) = host.get(&turn).await;
    assert_eq!(
        (&failed["state"], &failed["error"]["code"]),
        (&json!("failed"), &json!("turn_dropped")),
        "{failed}"
    );
    let (_, letters) = host.get("/v1/webhooks/dead-letters").await;
    assert_eq!(letters["data"].as_array().unwrap().len(), 3, "{letters}");
    let (status, detached) =
        host.post("/v1/agents/payer/sessions/held/messages?detach=true", json!({"text": PAYMENT})).await;
    assert_eq!(status, 202, "the session accepts messages again: {detached}");
    process.kill();
}

/// Returns a key that was never used before.
fn uuid() -> String {
    format!("{:?}", std::time::SystemTime::now()).replace(|c: char| !c.is_ascii_alphanumeric(), "")
}
