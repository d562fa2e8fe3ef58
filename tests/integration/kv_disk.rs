//! KV pages on disk, with the default model in real processes that are killed.

use crate::{
    durability::Process,
    harness::{Host, client, model_path},
};
use serde_json::{Value, json};
use std::{
    path::Path,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

fn start(data: &Path, arguments: &[&str]) -> (Host, Process) {
    let process = Process::with(Stdio::inherit(), arguments, model_path(), data);
    (Host::elsewhere(process.url.clone()), process)
}

/// Time after a turn within which its pages are on disk. The checksums of a debug build take longer.
const WRITTEN_WITHIN: Duration = Duration::from_secs(if cfg!(debug_assertions) { 60 } else { 2 });

/// Returns a text of about a thousand tokens.
fn long_text() -> String {
    let rule = |number: u32| {
        format!("Rule {number}: a parcel of {} kg goes to warehouse {}. ", number * 3 % 17, number % 7)
    };
    (1..60).map(rule).collect()
}

async fn chat(host: &Host, messages: &Value) -> Value {
    host.ok("/v1/chat/completions", json!({"messages": messages, "temperature": 0, "max_tokens": 24})).await
}

async fn say(host: &Host, text: &str) -> Value {
    let body = json!({"text": text, "data": {"max_tokens": 24, "temperature": 0}});
    host.ok("/v1/agents/clerk/sessions/ada/messages", body).await
}

async fn kv(host: &Host) -> Value {
    host.get("/v1/kv").await.1
}

/// Returns the number of pages in memory that somebody owns.
async fn in_memory(host: &Host) -> u64 {
    let owners = host.get("/v1/engine/pages").await.1["owners"].as_array().unwrap().clone();
    owners.iter().map(|owner| owner["pages"].as_u64().unwrap()).sum()
}

/// Waits until at least this many pages are on disk and nothing waits.
async fn written(host: &Host, pages: u64) {
    let begun = Instant::now();
    loop {
        let status = kv(host).await;
        if status["pages"].as_u64() >= Some(pages) && status["queued_bytes"] == 0 {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(120), "{status}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Returns the number of pages on disk once it no longer changes.
async fn settled(host: &Host) -> u64 {
    let mut before = None;
    loop {
        written(host, 0).await;
        let status = kv(host).await;
        let now = (status["pages"].as_u64().unwrap(), status["written_pages"].clone());
        if before.as_ref() == Some(&now) {
            return now.0;
        }
        before = Some(now);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}

/// A host with pages on disk.
struct Warm {
    folder: tempfile::TempDir,
    host: Host,
    process: Process,
}

impl Warm {
    fn new() -> Warm {
        let folder = tempfile::tempdir().unwrap();
        // The disk of a test may be full, and other work may make it slower than computing.
        std::fs::write(folder.path().join("skep.toml"), "[kv]\ndisk_free_percent = 0\nalways_read = true\n")
            .unwrap();
        let (host, process) = Warm::run(folder.path());
        Warm { folder, host, process }
    }

    fn run(folder: &Path) -> (Host, Process) {
        let config = folder.join("skep.toml").display().to_string();
        start(&folder.join("data"), &["--config", &config])
    }

    fn kill_and_start(self) -> Warm {
        self.process.kill();
        let (host, process) = Warm::run(self.folder.path());
        Warm { folder: self.folder, host, process }
    }
}

/// Returns the number of tokens of a prompt, and how many of them were cached.
fn prompt_tokens(answer: &Value) -> (u64, u64) {
    let usage = &answer["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    (usage["prompt_tokens"].as_u64().unwrap(), cached.as_u64().unwrap())
}

/// Asserts that a prompt was read from the disk, and that the engine computed only the rest of it.
async fn assert_warm(what: &str, host: &Host, answer: &Value) {
    let (prompt, cached) = prompt_tokens(answer);
    let status = kv(host).await;
    println!("after kill -9: {what} has {prompt} tokens, {cached} of them cached; {status}");
    assert!(
        cached as f64 >= 0.95 * prompt as f64,
        "{what}: {cached} of {prompt} tokens were cached; {status}"
    );
    assert!(16 * status["read_pages"].as_u64().unwrap() >= cached, "{what}: {status}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_host_continues_sessions_and_chats_from_the_disk_with_the_same_answers() {
    let cold = tempfile::tempdir().unwrap();
    let mut messages = json!([{"role": "system", "content": long_text()}, {"role": "user", "content": "Where does 9 kg go?"}]);
    let mut warm = Warm::new();
    let (reference, other) = start(cold.path(), &["--kv-disk-gb", "0"]);
    assert_eq!(kv(&reference).await["is_on"], false);
    for host in [&warm.host, &reference] {
        assert_eq!(host.deploy_guest("generate", "clerk", "").await.0, 201);
    }
    let first = chat(&warm.host, &messages).await;
    let text = &first["choices"][0]["message"]["content"];
    assert_eq!(chat(&reference, &messages).await["choices"][0]["message"]["content"], *text);
    let turn = json!([{"role": "assistant", "content": text}, {"role": "user", "content": "And 12 kg?"}]);
    let task = format!("{} Where does a parcel of 12 kg go?", long_text());
    let said = say(&warm.host, &task).await;
    let ended = Instant::now();
    let pages = 2 * (prompt_tokens(&first).0 / 16) - 4;
    written(&warm.host, pages).await;
    println!("{pages} pages were on disk {} ms after the turn", ended.elapsed().as_millis());
    assert!(ended.elapsed() < WRITTEN_WITHIN, "the pages were on disk only after {:?}", ended.elapsed());
    // The host is killed with the last pages on disk, too, whose number the answers do not say.
    settled(&warm.host).await;
    assert_eq!(say(&reference, &task).await["text"], said["text"]);
    other.terminate();
    let (reference, other) = start(cold.path(), &["--kv-disk-gb", "0"]);
    messages.as_array_mut().unwrap().extend(turn.as_array().unwrap().clone());
    let expected = chat(&reference, &messages).await;
    assert_eq!(prompt_tokens(&expected).1, 0);

    // One restart is enough: nothing is computed but what is new.
    warm = warm.kill_and_start();
    let status = kv(&warm.host).await;
    assert!(status["pages_at_start"].as_u64() >= Some(pages), "{status}");
    let second = chat(&warm.host, &messages).await;
    assert_eq!(second["choices"][0]["message"]["content"], expected["choices"][0]["message"]["content"]);
    assert_warm("a chat", &warm.host, &second).await;
    let answer = say(&warm.host, "And 20 kg?").await;
    assert_eq!(say(&reference, "And 20 kg?").await["text"], answer["text"]);
    assert_warm("a session", &warm.host, &answer).await;
    let read = kv(&warm.host).await;
    assert!(read["read_pages"].as_u64() > Some(0) && read["damaged_pages"] == 0, "{read}");

    // A session takes its pages with it, and a purge the rest.
    let host = &warm.host;
    let (before, cached) = (settled(host).await, in_memory(host).await);
    let session = host.at("/v1/agents/clerk/sessions/ada");
    assert!(client().delete(session).send().await.unwrap().status().is_success());
    let left = settled(host).await;
    assert!(left + 40 < before, "{left} of {before} pages are left");
    let still = in_memory(host).await;
    assert!(still + 40 < cached, "{still} of {cached} pages are left in memory");
    let purge = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(["kv", "purge", "--url", &host.url])
            .args(arguments)
            .output()
            .unwrap();
        (output.status.code(), String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
    };
    let (code, said) = purge(&["--tenant", "nobody"]);
    assert!(code == Some(0) && said.contains("erased 0 pages"), "{said}");
    let (code, said) = purge(&[]);
    assert!(code == Some(2) && said.contains("--yes"), "{said}");
    let (code, said) = purge(&["--yes"]);
    assert!(code == Some(0) && said.contains(&format!("erased {left} pages")), "{said}");
    assert_eq!((&kv(host).await["pages"], in_memory(host).await), (&json!(0), 0));
    warm.process.terminate();
    other.terminate();
}
