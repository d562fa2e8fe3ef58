//! Calls of an agent's own tools that need approval, over HTTP, and on a host that is killed in the meantime.

use crate::{
    durability::Process,
    harness::{Host, client, model_path, shared},
};
use serde_json::{Value, json};
use std::{
    io::{BufRead, BufReader, Write},
    net::TcpListener,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

async fn start(host: &Host, agent: &str, session: &str) -> String {
    start_with(host, agent, "", session, "pay the bill").await
}

async fn start_with(host: &Host, agent: &str, manifest: &str, session: &str, text: &str) -> String {
    host.deploy_guest("toolcall", agent, manifest).await;
    let path = format!("/v1/agents/{agent}/sessions/{session}/messages?detach=true");
    let (status, accepted) = host.post(&path, json!({ "text": text })).await;
    assert_eq!(status, 202, "{accepted}");
    accepted["events_url"].as_str().expect("a URL").to_owned()
}

/// Returns the data of the first event with this name.
async fn event(host: &Host, events_url: &str, name: &str) -> Value {
    let mut response = client().get(host.at(events_url)).send().await.expect("the events are there");
    let (mut body, name) = (String::new(), format!("event: {name}\n"));
    loop {
        let found = body.split("\n\n").find(|event| event.contains(&name) && event.contains("data: "));
        let data = found.and_then(|event| event.lines().find_map(|line| line.strip_prefix("data: ")));
        if let Some(value) = data.and_then(|data| serde_json::from_str(data).ok()) {
            return value;
        }
        let chunk = response.chunk().await.expect("readable");
        body.push_str(&String::from_utf8_lossy(&chunk.unwrap_or_else(|| panic!("no {name}in {body}"))));
    }
}

#[tokio::test]
async fn a_models_call_waits_for_approval_and_is_made_once() {
    let host = shared();
    let events = start(host, "payer", "yes").await;
    let asked = event(host, &events, "approval_required").await;
    assert_eq!(asked["tool"], "pay");
    let cents = asked["arguments"]["cents"].clone();
    assert!(cents.is_u64(), "{asked}");
    let (_, listed) = host.get("/v1/approvals").await;
    assert!(
        listed["data"].as_array().expect("a list").iter().any(|one| one["id"] == asked["id"]),
        "{listed}"
    );

    let id = asked["id"].as_str().expect("an id");
    let messages = "/v1/agents/payer/sessions/yes/messages";
    for accept in ["application/json", "text/event-stream"] {
        let behind = client().post(host.at(messages)).header("accept", accept).json(&json!({"text": "and?"}));
        let behind = behind.send().await.expect("an answer");
        assert_eq!(behind.status(), 409, "{accept}");
        let error = behind.json::<Value>().await.expect("JSON")["error"].take();
        assert_eq!(error["code"], "waiting_for_approval", "{error}");
        assert!(error["message"].as_str().expect("a text").contains(id), "{error}");
    }

    let path = format!("/v1/approvals/{id}");
    let (status, refused) = host.post(&path, json!({"decision": "maybe"})).await;
    assert_eq!(status, 400, "{refused}");
    let (status, decided) = host.post(&path, json!({"decision": "approve"})).await;
    assert_eq!((status, &decided["decision"]), (200, &json!("approve")), "{decided}");
    let (status, again) = host.post(&path, json!({"decision": "deny"})).await;
    assert_eq!((status, &again["error"]["code"]), (409, &json!("approval_decided")), "{again}");

    let done = event(host, &events, "done").await;
    assert_eq!(done["tool_calls"][0]["result"], cents, "{done}");
    let (_, session) = host.get("/v1/agents/payer/sessions/yes").await;
    assert_eq!(session["turns"], 1, "{session}");
    assert_eq!(host.post("/v1/approvals/nobody", json!({"decision": "deny"})).await.0, 404);
}

#[tokio::test]
async fn a_denied_call_gives_the_model_the_reason() {
    let host = shared();
    let events = start(host, "payer", "no").await;
    let asked = event(host, &events, "approval_required").await;
    let path = format!("/v1/approvals/{}", asked["id"].as_str().expect("an id"));
    host.ok(&path, json!({"decision": "deny", "reason": "ask the guest first"})).await;
    let done = event(host, &events, "done").await;
    assert_eq!(done["tool_calls"][0]["error"], "a person refused this call: ask the guest first", "{done}");
}

#[tokio::test]
async fn a_guest_cannot_answer_a_call_without_approval() {
    let host = shared();
    host.deploy_guest("toolcall", "sneak", "").await;
    let (status, answer) = host.message("sneak", "s", "sneak").await;
    assert_eq!(status, 500, "{answer}");
    let message = answer["error"]["message"].as_str().expect("a message");
    assert!(message.contains("calls of tool \"pay\" need a person's approval"), "{message}");
}

/// Runs `skep approval …` and returns its output.
async fn approval(url: &str, arguments: &[&str]) -> String {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.arg("approval").args(arguments).args(["--url", url]).stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

/// Starts a server that counts payments, independently of the host.
fn till() -> (String, Arc<AtomicUsize>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/till", listener.local_addr().unwrap());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut lines = BufReader::new(&mut stream).lines().map_while(Result::ok);
            let is_post = lines.next().is_some_and(|line| line.starts_with("POST /till "));
            // The request head must be complete; there is no body.
            if is_post && lines.any(|line| line.is_empty()) {
                counted.fetch_add(1, Ordering::AcqRel);
            }
            let _ = stream.write_all(b"HTTP/1.1 204 Paid\r\nconnection: close\r\n\r\n");
        }
    });
    (url, count)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pending_approval_survives_a_kill_and_its_call_is_made_once() {
    let (data, (till, count)) = (tempfile::tempdir().unwrap(), till());
    let config = data.path().join("skep.toml");
    let reaches_this_machine = "[grants]\nhosts = [\"*\"]\n[outbound]\nallow_private = [\"127.0.0.0/8\"]\n";
    std::fs::write(&config, reaches_this_machine).unwrap();
    let start = async || {
        let (data, config) = (data.path().join("data"), config.clone());
        let process = tokio::task::spawn_blocking(move || {
            let arguments = ["--config", config.to_str().unwrap()];
            Process::with(Stdio::inherit(), &arguments, model_path(), &data)
        });
        let process = process.await.unwrap();
        (Host::elsewhere(process.url.clone()), process)
    };
    let (host, process) = start().await;
    let text = format!("pay {till}");
    let events = start_with(&host, "payer", "[grants]\nhosts = [\"*\"]", "s", &text).await;
    let asked = event(&host, &events, "approval_required").await;
    process.kill();

    let (host, process) = start().await;
    let listed: Value = serde_json::from_str(&approval(&host.url, &["list", "--json"]).await).unwrap();
    assert_eq!((listed.as_array().unwrap().len(), &listed[0]["id"]), (1, &asked["id"]), "{listed}");
    assert_eq!((&listed[0]["tool"], &listed[0]["arguments"]), (&json!("pay"), &asked["arguments"]));
    let approved = approval(&host.url, &["approve", asked["id"].as_str().unwrap()]).await;
    assert_eq!(approved, "approved: pay of payer\n");
    // Kill the host at a random moment, before or after the call.
    process.kill();

    let (host, process) = start().await;
    let done = event(&host, &events, "done").await;
    assert_eq!(done["tool_calls"].as_array().unwrap().len(), 1, "{done}");
    let (call, paid) = (&done["tool_calls"][0], count.load(Ordering::Acquire));
    // If the host was killed while the request was in flight, it is unknown whether the request arrived; it
    // is never repeated.
    let is_interrupted =
        call["error"].as_str().is_some_and(|error| error.contains("unknown whether the server acted on it"));
    assert!(paid == 1 || paid == 0 && is_interrupted, "{paid} payments: {done}");
    // The model may have written the amount as 10.0.
    let is_paid = call["result"].as_f64().is_some_and(|paid| asked["arguments"]["cents"] == paid);
    assert!(is_interrupted || is_paid, "{done}");
    assert_eq!(approval(&host.url, &["list"]).await, "no calls wait for approval\n");
    let (status, exported) = host.get("/v1/agents/payer/sessions/s/export").await;
    // The values are base64.
    let paid_once = json!("MQ==");
    assert_eq!(
        (status, &exported["state"]["paid"], &exported["turns"]),
        (200, &paid_once, &json!(1)),
        "{exported}"
    );
    process.kill();
}

#[tokio::test]
async fn a_shutdown_while_a_turn_waits_for_approval_is_not_logged_as_a_failure() {
    let data = tempfile::tempdir().expect("a folder");
    let mut server = Command::new(env!("CARGO_BIN_EXE_skep"));
    server.args(["up", "--listen", "127.0.0.1:0", "--data"]).arg(data.path());
    server.arg("--model").arg(model_path());
    server.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut server = server.spawn().expect("it starts");
    let mut lines = BufReader::new(server.stdout.take().expect("piped")).lines();
    let url = lines.find_map(|line| {
        let line = line.expect("readable");
        line.split_whitespace().find(|word| word.starts_with("http://127.0.0.1")).map(str::to_owned)
    });
    let host = Host::elsewhere(url.expect("`skep up` prints its address"));
    let events = start(&host, "parked", "s").await;
    event(&host, &events, "approval_required").await;
    let pid = server.id().to_string();
    assert!(Command::new("kill").args(["-TERM", &pid]).status().expect("kill").success());
    let output = tokio::task::spawn_blocking(move || server.wait_with_output()).await.expect("no panic");
    let log = String::from_utf8(output.expect("it ends").stderr).expect("UTF-8");
    assert!(!log.contains("the turn failed"), "{log}");
    let line =
        log.lines().find(|line| line.contains("the turn is suspended")).unwrap_or_else(|| panic!("{log}"));
    assert!(
        line.contains(" INFO agent=\"parked\" session=\"local/s\" turn=1 ") || line.contains("session=\"s\""),
        "{line}"
    );
}
