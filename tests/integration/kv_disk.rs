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

/// A text of about a thousand tokens.
fn long_text() -> String {
    let rule = |number: u32| {
        format!("Rule {number}: a parcel of {} kg goes to warehouse {}. ", number * 3 % 17, number % 7)
    };
    (1..60).map(rule).collect()
}

/// Sends a chat and returns its text, the tokens of its prompt, and how many of them were cached.
async fn chat(host: &Host, messages: &Value) -> (String, u64, u64) {
    let body = json!({"messages": messages, "temperature": 0, "max_tokens": 24});
    let answer = host.ok("/v1/chat/completions", body).await;
    let usage = &answer["usage"];
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap().to_owned();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (text, usage["prompt_tokens"].as_u64().unwrap(), cached)
}

async fn say(host: &Host, text: &str) -> Value {
    let body = json!({"text": text, "data": {"max_tokens": 24, "temperature": 0}});
    host.ok("/v1/agents/clerk/sessions/ada/messages", body).await
}

async fn kv(host: &Host) -> Value {
    host.get("/v1/kv").await.1
}

/// Waits until at least this many pages are on disk and nothing waits.
async fn written(host: &Host, pages: u64) {
    let begun = Instant::now();
    loop {
        let status = kv(host).await;
        if status["pages"].as_u64() >= Some(pages) && status["queued_bytes"] == 0 {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{status}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_host_continues_sessions_and_chats_from_the_disk_with_the_same_answers() {
    let (warm, cold) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut messages = json!([{"role": "system", "content": long_text()}, {"role": "user", "content": "Where does 9 kg go?"}]);
    let (host, process) = start(warm.path(), &[]);
    let (reference, other) = start(cold.path(), &["--kv-disk-gb", "0"]);
    assert_eq!(kv(&reference).await["is_on"], false);
    for host in [&host, &reference] {
        assert_eq!(host.deploy_guest("generate", "clerk", "").await.0, 201);
    }
    let (first, prompt, _) = chat(&host, &messages).await;
    assert_eq!(chat(&reference, &messages).await.0, first);
    let task = format!("{} Where does a parcel of 12 kg go?", long_text());
    let said = say(&host, &task).await;
    assert_eq!(say(&reference, &task).await["text"], said["text"]);
    written(&host, 2 * (prompt / 16) - 4).await;
    process.kill();
    other.terminate();

    let (host, process) = start(warm.path(), &[]);
    let (reference, other) = start(cold.path(), &["--kv-disk-gb", "0"]);
    let found = kv(&host).await;
    assert!(found["pages_at_start"].as_u64() >= Some(2 * (prompt / 16) - 4), "{found}");
    let turn = json!([{"role": "assistant", "content": first}, {"role": "user", "content": "And 12 kg?"}]);
    messages.as_array_mut().unwrap().extend(turn.as_array().unwrap().clone());
    let (second, prompt, cached) = chat(&host, &messages).await;
    println!("after kill -9: a chat has {cached} of {prompt} tokens cached");
    assert!(cached as f64 >= 0.95 * prompt as f64, "{cached} of {prompt}");
    let (expected, _, computed) = chat(&reference, &messages).await;
    assert_eq!((second, computed), (expected, 0));
    let answer = say(&host, "And 20 kg?").await;
    let usage = &answer["usage"];
    let prompt = usage["prompt_tokens"].as_u64().unwrap();
    let cached = usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    println!("after kill -9: a session has {cached} of {prompt} tokens cached");
    assert!(cached as f64 >= 0.95 * prompt as f64, "{cached} of {prompt}");
    assert_eq!(say(&reference, "And 20 kg?").await["text"], answer["text"]);
    let read = kv(&host).await;
    assert!(read["read_pages"].as_u64() > Some(0) && read["damaged_pages"] == 0, "{read}");

    // A session takes its pages with it, and a purge the rest.
    written(&host, 1).await;
    let before = kv(&host).await["pages"].as_u64().unwrap();
    let session = host.at("/v1/agents/clerk/sessions/ada");
    assert!(client().delete(session).send().await.unwrap().status().is_success());
    let left = kv(&host).await["pages"].as_u64().unwrap();
    assert!(left + 40 < before, "{left} of {before} pages are left");
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
    assert_eq!(kv(&host).await["pages"], 0);
    process.terminate();
    other.terminate();
}
