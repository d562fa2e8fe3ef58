//! The development loop of an agent: `skep up --watch`, with `skep logs --follow` beside it.

use crate::{
    harness::{Host, guest, model_path},
    ports::unused_address,
};
use serde_json::Value;
use std::{
    io::{BufRead, BufReader, Read, Write},
    path::Path,
    process::{Child, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    time::Duration,
};

/// Much longer than any step takes. Only a line that never arrives waits this long.
const PATIENCE: Duration = Duration::from_secs(120);

/// A `skep` process whose output lines are read as they arrive. It is killed with the test.
struct Process {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
}

impl Process {
    fn start(arguments: &[&str]) -> Process {
        let mut child = Command::new(env!("CARGO_BIN_EXE_skep"))
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let stdout = lines(child.stdout.take().unwrap());
        let stderr = lines(child.stderr.take().unwrap());
        Process { child, stdout, stderr }
    }

    /// Starts `skep up` and returns its address.
    fn up(arguments: &[&str]) -> (Process, Host) {
        let model = model_path().to_str().unwrap();
        let process = Process::start(&[&["up", "--threads", "1", "--model", model], arguments].concat());
        let line = wait_for(&process.stdout, "skep is up at");
        let url = line.split_whitespace().find(|word| word.starts_with("http://")).unwrap();
        (process, Host::elsewhere(url.to_owned()))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

fn lines(pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    // The thread ends with the process. A finished test no longer reads.
    std::thread::spawn(move || {
        for line in BufReader::new(pipe).lines().map_while(Result::ok) {
            let _ = sender.send(line);
        }
    });
    receiver
}

fn wait_for(lines: &Receiver<String>, words: &str) -> String {
    let mut before = Vec::new();
    loop {
        match lines.recv_timeout(PATIENCE) {
            Ok(line) if line.contains(words) => return line,
            Ok(line) => before.push(line),
            Err(_) => panic!("no line has {words:?}: {before:#?}"),
        }
    }
}

async fn said(host: &Host, text: &str) -> String {
    let (status, answer) = host.message("dev", "s", text).await;
    assert_eq!(status, 200, "{answer}");
    answer["text"].as_str().unwrap().to_owned()
}

#[tokio::test]
async fn a_change_is_built_and_deployed_and_a_failed_build_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    // A file changes at once, so that the host never sees a part of it.
    let write = |name: &str, bytes: &[u8]| {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(bytes).unwrap();
        file.persist(folder.path().join(name)).unwrap();
    };
    let manifest = |command: &str| {
        format!("name = \"dev\"\ncomponent = \"out.wasm\"\n[build]\ncommand = \"{command}\"\n")
    };
    let [first, second] = tokio::task::spawn_blocking(|| ["panic", "chatty"].map(guest)).await.unwrap();
    write("source.wasm", &first);
    write("agent.toml", manifest("cp source.wasm out.wasm").as_bytes());
    let path = folder.path().to_str().unwrap();
    let (process, host) = Process::up(&["--ephemeral", "--listen", "127.0.0.1:0", "--watch", path]);
    assert_eq!(said(&host, "echo one").await, "one");

    write("source.wasm", &second);
    let updated = wait_for(&process.stderr, "dev version 2 active");
    assert!(updated.contains("updated") && updated.contains("s after the change"), "{updated}");
    assert_eq!(said(&host, "levels").await, "logged");

    write("agent.toml", manifest("echo the oven is cold >&2; false").as_bytes());
    wait_for(&process.stderr, "not updated");
    wait_for(&process.stderr, "the oven is cold");
    assert_eq!(said(&host, "levels").await, "logged");

    write("agent.toml", manifest("cp source.wasm out.wasm").as_bytes());
    let unchanged = wait_for(&process.stderr, "dev: the build is version 2, which is already active");
    assert!(unchanged.contains("unchanged"), "{unchanged}");

    write("source.wasm", &first);
    let updated = wait_for(&process.stderr, "dev version 3 active");
    assert!(updated.contains("updated"), "{updated}");
}

#[tokio::test]
async fn following_the_log_survives_a_restart_without_duplicate_lines() {
    let data = tempfile::tempdir().unwrap();
    let address = unused_address();
    let up = |data: &Path| Process::up(&["--listen", &address, "--data", data.to_str().unwrap()]);
    let (process, host) = up(data.path());
    assert_eq!(host.deploy_guest("chatty", "dev", "").await.0, 201);
    assert_eq!(said(&host, "levels").await, "logged");

    let arguments =
        ["logs", "dev", "--url", &host.url, "--follow", "--json", "--level", "warn", "--session", "s"];
    let follower = Process::start(&arguments);
    let next = || {
        let line = follower.stdout.recv_timeout(PATIENCE).expect("a line arrives");
        let line: Value = serde_json::from_str(&line).unwrap();
        (line["turn"].as_u64().unwrap(), line["message"].as_str().unwrap().to_owned())
    };
    let of_turn = |turn| [(turn, "a warn line".to_owned()), (turn, "an error line".to_owned())];
    assert_eq!([next(), next()], of_turn(1));
    let (status, answer) = host.message("dev", "another", "levels").await;
    assert_eq!(status, 200, "{answer}");
    assert_eq!(said(&host, "levels").await, "logged");
    assert_eq!([next(), next()], of_turn(2));

    drop(process);
    wait_for(&follower.stderr, "lost the connection to the host");
    let (_process, host) = up(data.path());
    assert_eq!(said(&host, "levels").await, "logged");
    assert_eq!([next(), next()], of_turn(3));
}

#[tokio::test]
async fn log_pages_are_filtered_and_an_invalid_filter_is_named() {
    let host = crate::harness::shared();
    assert_eq!(host.deploy_guest("chatty", "filtered", "").await.0, 201);
    assert_eq!(host.message("filtered", "ada", "levels").await.0, 200);
    let messages = async |query: &str| {
        let (status, page) = host.get(&format!("/v1/agents/filtered/logs?{query}")).await;
        assert_eq!(status, 200, "{page}");
        let lines = page["data"].as_array().unwrap().clone();
        lines.iter().map(|line| line["message"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    assert_eq!(messages("").await.len(), 4);
    assert_eq!(messages("level=error").await, ["an error line"]);
    assert!(messages("session=bob").await.is_empty());
    assert!(messages("since_ms=99999999999999").await.is_empty());
    let (_, all) = host.get("/v1/logs?limit=1000").await;
    let agents = all["data"].as_array().unwrap().iter().map(|line| &line["agent"]);
    assert_eq!(agents.filter(|agent| *agent == "filtered").count(), 4);
    let (status, refusal) = host.get("/v1/agents/filtered/logs?level=loud").await;
    assert_eq!(status, 400);
    assert!(refusal["error"]["message"].as_str().unwrap().contains("debug, info, warn, error"), "{refusal}");
}
