//! Turns and crashes: a real host is killed at many points under load, and restarted.
//!
//! The points are drawn from a seed and counted in events that clients saw, so that they fall anywhere: while
//! a turn waits, between two tokens, before and after a commit, and while turns of the previous process are
//! still being replayed.

use crate::harness::{client, guest, repository};
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    io::{BufRead, BufReader, Read as _},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};
use tokio::{sync::watch, task::JoinSet};

/// Number of kills per run. Hundreds take a few minutes.
const KILLS: u32 = 12;
const WORKERS: usize = 6;
/// Number of messages after which a client moves to a new session, so that prompts stay short.
const MESSAGES_PER_SESSION: usize = 4;
/// Maximum number of events between two kills.
const MAX_EVENTS_BETWEEN_KILLS: u64 = 40;

/// A `skep up` process.
pub struct Process {
    child: Child,
    pub url: String,
}

impl Process {
    pub fn start(model: &Path, data: &Path) -> Process {
        Process::logging_to(Stdio::inherit(), model, data)
    }

    pub fn logging_to(log: Stdio, model: &Path, data: &Path) -> Process {
        Process::with(log, &[], model, data)
    }

    /// Starts a process with an operator's configuration.
    pub fn configured(config: &Path, model: &Path, data: &Path) -> Process {
        Process::with(Stdio::inherit(), &["--config", &config.display().to_string()], model, data)
    }

    /// Starts a process with additional arguments.
    pub fn with(log: Stdio, arguments: &[&str], model: &Path, data: &Path) -> Process {
        Process::in_environment(&[], log, arguments, model, data)
    }

    /// Starts a process with additional variables and arguments.
    pub fn in_environment(
        variables: &[(&str, &str)],
        log: Stdio,
        arguments: &[&str],
        model: &Path,
        data: &Path,
    ) -> Process {
        let listen: &[&str] =
            if arguments.contains(&"--listen") { &[] } else { &["--listen", "127.0.0.1:0"] };
        let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["up", "--threads", "1", "--log-level", "error"])
            .args(listen)
            .arg("--model")
            .arg(model)
            .arg("--data")
            .arg(data)
            .args(arguments)
            .envs(variables.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(log)
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(|line| line.unwrap());
        let url = lines
            .find_map(|line| {
                line.split_whitespace().find(|word| word.starts_with("http://")).map(str::to_owned)
            })
            .expect("`skep up` prints its URL");
        // The remaining output is discarded.
        std::thread::spawn(move || lines.for_each(drop));
        Process { child, url: url.trim_end_matches('/').to_owned() }
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the process has ended with an error by itself, and returns what it wrote to its log, which must be a pipe.
    pub fn until_failed(mut self) -> String {
        let mut said = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
        assert_eq!(self.child.wait().unwrap().code(), Some(1), "{said}");
        said
    }

    /// Stops the process in order.
    pub fn terminate(mut self) {
        assert!(Command::new("kill").args(["-TERM", &self.id().to_string()]).status().unwrap().success());
        assert!(self.child.wait().unwrap().success());
    }

    /// Kills the process with SIGKILL, so that none of its code runs again.
    pub fn kill(mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Kills the host if the test fails.
impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A small random number generator, so that a run can be repeated.
struct Draws(u64);

impl Draws {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % bound
    }
}

/// The way in which a message is sent, which determines what can happen to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Sent with an idempotency key, and followed by its events.
    Keyed,
    /// Accepted with 202, and followed by the id of its turn.
    Detached,
    /// Sent like most clients do. If the connection breaks before the turn has started, the message may be
    /// lost.
    Plain,
}

/// Message and reply data of each turn, by turn number.
type Turns = BTreeMap<u64, (String, Value)>;

/// Everything that the clients know.
struct Load {
    /// The URL of the host, while it is running.
    url: watch::Receiver<Option<String>>,
    /// Number of events that all clients have seen.
    events: watch::Sender<u64>,
    ends: AtomicBool,
    /// Finished turns by session.
    done: Mutex<BTreeMap<String, Turns>>,
    /// Messages for which it is unknown whether they were accepted, with their sessions.
    unsure: Mutex<Vec<(String, String)>>,
}

/// Everything that one client has seen of one turn.
#[derive(Default)]
pub struct Seen {
    turn_id: Option<String>,
    pub last_id: Option<u64>,
    pub said: String,
    pub done: Option<Value>,
}

impl Seen {
    /// Removes whole events from the front of `body`. Each must be new.
    fn take(&mut self, body: &mut String, events: &watch::Sender<u64>) {
        while let Some(end) = body.find("\n\n") {
            let event: String = body.drain(..end + 2).collect();
            let field = |name: &str| {
                event
                    .lines()
                    .find_map(|line| line.strip_prefix(name))
                    .map(|value| value.trim_start().to_owned())
            };
            let (Some(name), Some(data)) = (field("event:"), field("data:")) else { continue };
            let data: Value = serde_json::from_str(&data).unwrap();
            if name == "error" {
                // The host was killed while it reported the error, or the turn failed, which none of these
                // turns may.
                panic!("a turn failed: {data}");
            }
            let id: u64 = field("id:").expect("every event has an id").parse().unwrap();
            assert!(self.last_id.is_none_or(|last| last < id), "event {id} came after {:?}", self.last_id);
            assert!(self.done.is_none(), "{name} came after the end");
            self.last_id = Some(id);
            events.send_modify(|events| *events += 1);
            match name.as_str() {
                "turn" => self.turn_id = Some(data["turn_id"].as_str().unwrap().to_owned()),
                "delta" => self.said.push_str(data["text"].as_str().unwrap()),
                "done" => self.done = Some(data),
                _ => {}
            }
        }
    }

    /// Reads a response until it or the host ends.
    pub async fn read(&mut self, mut response: reqwest::Response, events: &watch::Sender<u64>) {
        let mut body = String::new();
        let mut bytes = Vec::new();
        while let Ok(Some(chunk)) = response.chunk().await {
            bytes.extend_from_slice(&chunk);
            let whole = match std::str::from_utf8(&bytes) {
                Ok(text) => text.len(),
                Err(error) => error.valid_up_to(),
            };
            body.push_str(std::str::from_utf8(&bytes[..whole]).unwrap());
            bytes.drain(..whole);
            self.take(&mut body, events);
        }
    }
}

impl Load {
    /// Returns the URL of the host as soon as it is running.
    async fn url(&self) -> String {
        self.url.clone().wait_for(Option::is_some).await.unwrap().clone().unwrap()
    }

    /// Waits for the next host after the host at `url` stopped answering.
    async fn lost(&self, url: &str) {
        self.url.clone().wait_for(|now| now.as_deref() != Some(url)).await.unwrap();
    }

    /// Runs one client: message after message, each until its turn has finished, regardless of kills.
    async fn work(self: Arc<Self>, worker: usize) {
        let mut number = 0;
        while !self.ends.load(Ordering::Relaxed) {
            let session = format!("w{worker}-{}", number / MESSAGES_PER_SESSION);
            let text = format!("message {number} of {worker}");
            let way = [Way::Keyed, Way::Detached, Way::Plain][(worker + number) % 3];
            number += 1;
            let seen = self.deliver(&session, &text, way).await;
            let Some(done) = seen.done else {
                self.unsure.lock().unwrap().push((session, text));
                continue;
            };
            assert_eq!(done["text"].as_str().unwrap(), seen.said, "the deltas are the reply");
            let turn = done["turn"].as_u64().unwrap();
            let mut sessions = self.done.lock().unwrap();
            let before = sessions.entry(session).or_default().insert(turn, (text, done["data"].clone()));
            assert!(before.is_none(), "turn {turn} finished twice");
        }
    }

    async fn deliver(&self, session: &str, text: &str, way: Way) -> Seen {
        let path = format!("/v1/agents/ledger/sessions/{session}");
        let mut seen = Seen::default();
        while seen.done.is_none() {
            let url = self.url().await;
            let request = match &seen.turn_id {
                Some(id) => {
                    let request = client().get(format!("{url}{path}/turns/{id}/events"));
                    match seen.last_id {
                        Some(last) => request.header("last-event-id", last),
                        None => request,
                    }
                }
                None => {
                    let request =
                        client().post(format!("{url}{path}/messages")).json(&json!({ "text": text }));
                    match way {
                        Way::Plain => request.header("accept", "text/event-stream"),
                        Way::Keyed => {
                            request.header("accept", "text/event-stream").header("idempotency-key", text)
                        }
                        Way::Detached => {
                            request.header("prefer", "respond-async").header("idempotency-key", text)
                        }
                    }
                }
            };
            let Ok(response) = request.send().await else {
                if way == Way::Plain && seen.turn_id.is_none() {
                    return seen;
                }
                self.lost(&url).await;
                continue;
            };
            match response.status().as_u16() {
                200 => seen.read(response, &self.events).await,
                202 => {
                    if let Ok(accepted) = response.json::<Value>().await {
                        seen.turn_id = Some(accepted["turn_id"].as_str().unwrap().to_owned());
                    }
                }
                status => panic!("{status}: {}", response.text().await.unwrap_or_default()),
            }
            if way == Way::Plain && seen.turn_id.is_none() {
                return seen;
            }
            if seen.done.is_none() && response_broke_off(way, &seen) {
                self.lost(&url).await;
            }
        }
        seen
    }
}

/// Returns whether a stream was cut off with its host. The response to a detached message is complete and
/// only says where to continue.
fn response_broke_off(way: Way, seen: &Seen) -> bool {
    way != Way::Detached || seen.turn_id.is_none() || seen.last_id.is_some()
}

/// Starts a process and waits until it listens.
async fn started(model: &Path, data: &Path) -> Process {
    let (model, data) = (model.to_owned(), data.to_owned());
    tokio::task::spawn_blocking(move || Process::start(&model, &data)).await.unwrap()
}

/// Writes a model with random weights, which loads instantly.
pub fn tiny_model(folder: &Path) {
    tiny_model_of("llama-gqa", folder);
}

/// Writes the model of a fixture with a tokenizer, and with room for longer contexts.
pub fn tiny_model_of(fixture: &str, folder: &Path) {
    let fixtures = repository().join("tests/fixtures");
    let source = fixtures.join("tiny").join(fixture);
    let mut config: Value =
        serde_json::from_slice(&std::fs::read(source.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(4096);
    std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
    std::fs::copy(source.join("model.safetensors"), folder.join("model.safetensors")).unwrap();
    std::fs::copy(fixtures.join("tokenizer/byte-level-chatml.json"), folder.join("tokenizer.json")).unwrap();
}

pub async fn deploy_ledger(url: &str) {
    deploy(url, "ledger").await;
}

async fn deploy(url: &str, name: &'static str) {
    let component = tokio::task::spawn_blocking(|| guest(name)).await.unwrap();
    let form = reqwest::multipart::Form::new()
        .text("manifest", format!("name = \"{name}\""))
        .part("component", reqwest::multipart::Part::bytes(component.to_vec()).file_name("agent.wasm"));
    let response = client().post(format!("{url}/v1/agents")).multipart(form).send().await.unwrap();
    assert_eq!(response.status(), 201);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_race_has_the_same_outcome_after_a_crash() {
    has_the_same_end("race", "\"short\"").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_read_part_of_a_failed_stream_reads_it_again_after_a_crash() {
    has_the_same_end("partial", "\"read and cut off\"").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_guest_that_interleaves_reads_and_sleeps_has_the_same_order_after_a_crash() {
    has_the_same_end("weave", "read and waited").await;
}

/// Kills the host while this guest generates visibly, and checks the outcome of its turn after the restart.
async fn has_the_same_end(agent: &'static str, end: &str) {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let start = || started(model.path(), data.path());
    let mut process = start().await;
    deploy(&process.url, agent).await;
    for round in 0..10 {
        let turns = format!("/v1/agents/{agent}/sessions/{round}");
        let send = client().post(format!("{}{turns}/messages", process.url)).json(&json!({"text": "go"}));
        let accepted = send.header("prefer", "respond-async").send().await.unwrap();
        let accepted: Value = accepted.json().await.unwrap();
        let turn = format!("{turns}/turns/{}", accepted["turn_id"].as_str().unwrap());
        let mut events = client().get(format!("{}{turn}/events", process.url)).send().await.unwrap();
        let (mut seen, mut generates) = (String::new(), false);
        while !generates && let Some(chunk) = events.chunk().await.unwrap() {
            seen.push_str(&String::from_utf8_lossy(&chunk));
            generates = seen.contains("event: delta");
        }
        process.kill();
        process = start().await;
        let state: Value =
            client().get(format!("{}{turn}", process.url)).send().await.unwrap().json().await.unwrap();
        let ended = client().get(format!("{}{turn}/events", process.url)).send().await.unwrap();
        let ended = ended.text().await.unwrap();
        assert!(ended.contains("event: done") && ended.contains(end), "{ended}");
        if state["state"] != "done" {
            process.kill();
            return;
        }
    }
    panic!("no turn was cut off");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_killed_repeatedly_loses_duplicates_and_tears_nothing() {
    let (model, data) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    tiny_model(model.path());
    let start = || started(model.path(), data.path());
    let mut process = start().await;
    deploy_ledger(&process.url).await;
    let (url, where_it_is) = watch::channel(Some(process.url.clone()));
    let load = Arc::new(Load {
        url: where_it_is,
        events: watch::Sender::new(0),
        ends: AtomicBool::new(false),
        done: Mutex::default(),
        unsure: Mutex::default(),
    });
    let mut workers: JoinSet<()> = (0..WORKERS).map(|worker| load.clone().work(worker)).collect();
    let (mut draws, mut events) = (Draws(2026), load.events.subscribe());
    for _ in 0..KILLS {
        let enough = *events.borrow() + draws.below(MAX_EVENTS_BETWEEN_KILLS);
        tokio::select! {
            _ = events.wait_for(|events| *events >= enough) => {}
            Some(ended) = workers.join_next() => ended.expect("a client found no error"),
        }
        process.kill();
        url.send_replace(None);
        process = start().await;
        url.send_replace(Some(process.url.clone()));
    }
    load.ends.store(true, Ordering::Relaxed);
    while let Some(ended) = workers.join_next().await {
        ended.expect("a client found no error");
    }

    let unsure = load.unsure.lock().unwrap().clone();
    let done = load.done.lock().unwrap().clone();
    let mut sessions: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let named = done.keys().chain(unsure.iter().map(|(session, _)| session));
    for session in named.cloned().collect::<BTreeSet<_>>() {
        let path = format!("{}/v1/agents/ledger/sessions/{session}", process.url);
        let request = client().post(format!("{path}/messages")).json(&json!({"text": "entries"}));
        let last: Value = request.send().await.unwrap().json().await.unwrap();
        let entries: Vec<String> = serde_json::from_value(last["data"].clone()).unwrap();
        assert_eq!(
            last["turn"].as_u64().unwrap(),
            entries.len() as u64 + 1,
            "one turn for each entry: {entries:?}"
        );
        let detail: Value = client().get(&path).send().await.unwrap().json().await.unwrap();
        assert_eq!(detail["messages"].as_array().unwrap().len(), entries.len() * 2, "{session}: {entries:?}");
        sessions.insert(session, entries);
    }
    assert_eq!(faults(&done, &unsure, &sessions), [""; 0]);
    let delivered: usize = done.values().map(BTreeMap::len).sum();
    assert!(delivered > 0);
    println!("{KILLS} kills, {delivered} turns delivered, {} unsure", unsure.len());
    process.kill();
}

/// Returns the faults in the sessions' entries. Each text that a client saw finished must exist once, at the
/// position of its turn. A text with an unknown outcome may exist once. Nothing else may exist.
fn faults(
    done: &BTreeMap<String, Turns>,
    unsure: &[(String, String)],
    sessions: &BTreeMap<String, Vec<String>>,
) -> Vec<String> {
    let mut faults = Vec::new();
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for entry in sessions.values().flatten() {
        *counts.entry(entry).or_default() += 1;
    }
    let mut count = |text: &str| counts.remove(text).unwrap_or_default();
    for (session, turns) in done {
        for (turn, (text, at_its_end)) in turns {
            match count(text) {
                1 => {}
                0 => faults.push(format!("{text:?} is lost")),
                count => faults.push(format!("{text:?} was done {count} times")),
            }
            let place = usize::try_from(*turn).unwrap();
            let seen = sessions.get(session).and_then(|entries| entries.get(..place));
            if seen.and_then(<[_]>::last) != Some(text) || *at_its_end != json!(seen) {
                faults.push(format!("turn {turn} of {session} differs from what its client saw"));
            }
        }
    }
    for (_, text) in unsure {
        match count(text) {
            0 | 1 => {}
            count => faults.push(format!("{text:?} was done {count} times")),
        }
    }
    faults.extend(counts.into_keys().map(|text| format!("no client sent {text:?}")));
    faults
}

#[test]
fn lost_duplicated_moved_and_unknown_entries_are_detected() {
    let turns = |texts: &[&str]| -> Turns {
        let told =
            |(index, text): (usize, &&str)| (index as u64 + 1, (text.to_string(), json!(texts[..=index])));
        texts.iter().enumerate().map(told).collect()
    };
    let done: BTreeMap<String, Turns> = [("s".to_owned(), turns(&["a", "b"]))].into();
    let unsure = [("t".to_owned(), "c".to_owned())];
    let seen = |s: &[&str], t: &[&str]| {
        let texts = |texts: &[&str]| texts.iter().map(|text| text.to_string()).collect();
        let sessions = [("s".to_owned(), texts(s)), ("t".to_owned(), texts(t))];
        faults(&done, &unsure, &sessions.into()).join("; ")
    };
    assert_eq!((seen(&["a", "b"], &["c"]), seen(&["a", "b"], &[])), (String::new(), String::new()));
    for (s, t, fault) in [
        (&["a", "b", "b"][..], &["c"][..], "\"b\" was done 2 times"),
        (&["a", "b"], &["a"], "\"a\" was done 2 times"),
        (&["a", "b"], &["c", "c"], "\"c\" was done 2 times"),
        (&["a"], &[], "\"b\" is lost"),
        (&["b", "a"], &[], "turn 1 of s differs from what its client saw"),
        (&["a", "b"], &["d"], "no client sent \"d\""),
    ] {
        assert!(seen(s, t).contains(fault), "{s:?} {t:?}: {:?}", seen(s, t));
    }
}
