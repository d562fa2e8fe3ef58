//! The `skep` binary: help, exit codes, `new`, `model verify`, and a server that drains on SIGTERM.

use crate::{
    durability::tiny_model,
    harness::{Host, Killed, MODEL, client, model_path, repository, shared},
    ports::unused_address,
};
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader, Read, Write},
    net::{Shutdown, TcpListener},
    process::{Command, Output, Stdio},
    time::{Duration, Instant},
};

fn skep(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_skep")).args(arguments).stdin(Stdio::null()).output().unwrap()
}

/// Runs a command against a host.
async fn against(host: &Host, arguments: &[&str]) -> Output {
    let arguments: Vec<String> =
        arguments.iter().chain(&["--url", &host.url]).map(ToString::to_string).collect();
    let run = move || skep(&arguments.iter().map(String::as_str).collect::<Vec<_>>());
    tokio::task::spawn_blocking(run).await.unwrap()
}

/// Runs a command against a host, which must succeed, and returns what it printed.
async fn printed(host: &Host, arguments: &[&str]) -> String {
    let output = against(host, arguments).await;
    assert!(output.status.success(), "{arguments:?}: {}", text(&output.stderr));
    text(&output.stdout)
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn every_command_explains_itself() {
    let help = text(&skep(&["--help"]).stdout);
    for command in [
        "demo",
        "up",
        "new",
        "wit",
        "build",
        "deploy",
        "push",
        "pull",
        "rollback",
        "delete",
        "list",
        "status",
        "invoke",
        "turn",
        "session",
        "secret",
        "chat",
        "logs",
        "approval",
        "ai",
        "mcp",
        "schedule",
        "event",
        "webhook",
        "key",
        "config",
        "model",
        "bench",
        "kernels",
        "doctor",
        "health",
        "openapi",
        "completions",
    ] {
        assert!(help.contains(command), "--help does not mention {command}");
        let output = skep(&[command, "--help"]);
        assert!(output.status.success(), "{command} --help");
        assert!(text(&output.stdout).lines().count() > 3, "{command} --help is too short");
    }
}

#[test]
fn openapi_prints_the_document_of_the_routes_without_a_host() {
    let printed = skep(&["openapi"]);
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    let document: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!(document, skep_gateway::openapi_document());
    assert_eq!(
        document["paths"]["/v1/agents"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]["$ref"],
        "#/components/schemas/Deployment"
    );
}

#[test]
fn missing_kernels_and_compilers_are_named_in_the_error() {
    let dir = tempfile::tempdir().unwrap();
    let path = |name: &str| dir.path().join(name).display().to_string();
    let failed = |output: Output, code: i32| {
        assert_eq!(output.status.code(), Some(code), "{}", text(&output.stderr));
        text(&output.stderr)
    };
    let (out, nvrtc) = (path("cubins"), path("libnvrtc.so"));
    let said = failed(skep(&["kernels", "build", "--out", &out, "--nvrtc", &nvrtc]), 1);
    assert!(said.contains(&nvrtc) && said.contains("nvidia-cuda-nvrtc"), "{said}");
    let said = failed(skep(&["kernels", "build", "--out", &out, "--arch", "sm_75"]), 2);
    assert!(said.contains("sm_75") && said.contains("sm_90a"), "{said}");
    assert!(!dir.path().join("cubins").exists(), "nothing was written");
    let said = failed(skep(&["kernels", "list", "--dir", &path("")]), 1);
    assert!(said.contains("skep kernels build"), "{said}");
    let mut named = Command::new(env!("CARGO_BIN_EXE_skep"));
    let named = named.args(["kernels", "list"]).env("SKEP_CUBINS", &out).output().unwrap();
    let said = failed(named, 1);
    assert!(said.contains("SKEP_CUBINS") && said.contains(&out), "{said}");
}

#[test]
fn wrong_usage_and_an_unreachable_server_have_their_own_exit_codes() {
    assert_eq!(skep(&["no-such-command"]).status.code(), Some(2));
    let output = skep(&["list", "--url", "http://127.0.0.1:9"]);
    assert_eq!(output.status.code(), Some(3));
    assert!(text(&output.stderr).contains("skep up"), "{}", text(&output.stderr));
    let output = skep(&["model", "inspect", "/no/such/file.gguf"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/no/such/file.gguf"));
}

#[test]
fn a_server_that_hangs_up_during_an_upload_is_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let document = folder.path().join("session.json");
    let padded = json!({"session": "s", "padding": "x".repeat(30_000_000)});
    std::fs::write(&document, padded.to_string()).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (mut stream, mut bytes, mut left) = (stream.unwrap(), vec![0; 65_536], 2_000_000_usize);
            while left > 0 {
                let count = stream.read(&mut bytes).unwrap();
                left = if count == 0 { 0 } else { left.saturating_sub(count) };
            }
            stream.shutdown(Shutdown::Write).unwrap();
        }
    });
    // The connection breaks in different ways, by chance, and a broken pipe is only one of them.
    for _ in 0..12 {
        let output = skep(&["session", "import", "a", document.to_str().unwrap(), "--url", &url]);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{said:?}");
        assert!(said.starts_with("error: the host did not answer"), "{said}");
    }
}

#[test]
fn a_host_that_does_not_answer_is_not_healthy() {
    // The system accepts the connection, and nobody answers on it.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let started = Instant::now();
    let output = skep(&["health", "--url", &format!("http://{}", listener.local_addr().unwrap())]);
    assert_eq!(output.status.code(), Some(3), "{}", text(&output.stderr));
    assert!(text(&output.stderr).contains("no server answers"), "{}", text(&output.stderr));
    assert!(started.elapsed() >= Duration::from_secs(4), "a slow host has some time");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_goes_on_if_nobody_reads_its_output() {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let address = unused_address();
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(["up", "--ephemeral", "--listen", &address, "--threads", "1", "--model"]).arg(model.path());
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut host = Killed(command.spawn().unwrap());
    drop(host.0.stdout.take());
    let mut lines = BufReader::new(host.0.stderr.take().unwrap()).lines().map(|line| line.unwrap());
    let warning = lines.find(|line| line.contains("the description of this host cannot be printed"));
    assert!(warning.is_some(), "the host ended");
    let health = client().get(format!("http://{address}/healthz")).send().await.unwrap();
    assert_eq!(health.status(), 200);
}

#[test]
fn tiny_models_of_every_architecture_verify() {
    let entries = std::fs::read_dir(repository().join("tests/fixtures/tiny")).unwrap();
    let folders = entries.map(|entry| entry.unwrap().path());
    let folders: Vec<_> = folders.filter(|folder| folder.join("expected.safetensors").is_file()).collect();
    assert!(folders.len() >= 15, "{folders:?}");
    for folder in folders {
        let name = folder.file_name().unwrap().display();
        let output = skep(&["model", "verify", folder.to_str().unwrap(), "--json"]);
        assert!(output.status.success(), "{name}: {}", text(&output.stderr));
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        let error = report["max_relative_error"].as_f64().unwrap();
        assert!(error <= 1e-3, "{name}: {error}");
        assert_eq!(report["passed"], true);
    }
}

#[test]
fn a_sharded_model_verifies_or_lists_the_possible_divisions() {
    let folder = repository().join("tests/fixtures/tiny/qwen3-qknorm");
    let verify = |flags: &[&str]| skep(&[&["model", "verify", folder.to_str().unwrap()], flags].concat());
    for flags in [["--tp", "4", "--pp", "1"], ["--tp", "2", "--pp", "3"]] {
        let output = verify(&flags);
        assert!(output.status.success(), "{flags:?}: {}", text(&output.stderr));
    }
    for (flags, problem) in [
        (["--tp", "3"], "3 does not divide the 4 attention heads; possible values: 1, 2, 4"),
        (["--pp", "4"], "3 layers cannot be divided into 4 stages; possible values: 1 to 3"),
    ] {
        let output = verify(&flags);
        assert_eq!(output.status.code(), Some(1));
        assert!(text(&output.stderr).contains(problem), "{}", text(&output.stderr));
    }
}

#[test]
fn a_wrong_model_fails_to_verify() {
    let source = repository().join("tests/fixtures/tiny/llama-gqa");
    let folder = tempfile::tempdir().unwrap();
    for file in ["model.safetensors", "expected.safetensors"] {
        std::fs::copy(source.join(file), folder.path().join(file)).unwrap();
    }
    let config = std::fs::read_to_string(source.join("config.json")).unwrap();
    std::fs::write(folder.path().join("config.json"), config.replace("10000.0", "20000.0")).unwrap();
    let output = skep(&["model", "verify", folder.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1), "{}", text(&output.stdout));
}

#[test]
fn completions_are_printed_for_every_shell() {
    for shell in ["bash", "zsh", "fish"] {
        assert!(text(&skep(&["completions", shell]).stdout).contains("skep"));
    }
}

#[test]
fn sigterm_lets_a_running_stream_finish() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().to_str().unwrap().to_owned();
    let mut server = Command::new(env!("CARGO_BIN_EXE_skep"))
        .arg("up")
        .arg(repository().join("examples/hello"))
        .args(["--listen", "127.0.0.1:0", "--data", &data, "--model", model_path().to_str().unwrap()])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(server.stdout.take().unwrap()).lines();
    let url = lines
        .by_ref()
        .map(|line| line.unwrap())
        .find_map(|line| {
            line.split_whitespace().find(|word| word.starts_with("http://127.0.0.1")).map(str::to_owned)
        })
        .expect("`skep up` prints its URL");
    let url = url.trim_end_matches(['/', '.', ',']).to_owned();
    let finished = tokio::runtime::Runtime::new().unwrap().block_on(async {
        let agent = client().get(format!("{url}/v1/agents/hello")).send().await.unwrap();
        assert_eq!(agent.status(), 200, "the named agent is deployed when the server answers");
        let request = json!({"prompt": "One, two,", "max_tokens": 60, "ignore_eos": true, "stream": true});
        let mut response =
            client().post(format!("{url}/v1/completions")).json(&request).send().await.unwrap();
        let mut body = response.chunk().await.unwrap().expect("the stream has started").to_vec();
        let pid = server.id().to_string();
        assert!(Command::new("kill").args(["-TERM", &pid]).status().unwrap().success());
        while let Some(chunk) = response.chunk().await.unwrap() {
            body.extend_from_slice(&chunk);
        }
        String::from_utf8(body).unwrap()
    });
    assert!(finished.trim_end().ends_with("[DONE]"), "{finished}");
    assert!(server.wait().unwrap().success());
}

#[tokio::test]
async fn chat_shows_the_tool_calls_of_an_agent() {
    let host = shared();
    assert_eq!(host.deploy_guest("toolcall", "talked-to", "").await.0, 201);
    let mut chat = Command::new(env!("CARGO_BIN_EXE_skep"));
    chat.args(["chat", "talked-to", "--session", "a", "--url", &host.url]);
    chat.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let output = tokio::task::spawn_blocking(move || {
        let mut chat = chat.spawn().unwrap();
        chat.stdin.take().unwrap().write_all(b"good add 1 and 2\n/session b\ngood add 3 and 4\n").unwrap();
        chat.wait_with_output().unwrap()
    });
    let output = output.await.unwrap();
    let said = text(&output.stdout);
    let told = text(&output.stderr);
    for session in ["a", "b"] {
        let expected = format!("talking to talked-to in the new session {session}\n");
        assert!(told.contains(&expected), "{told}");
    }
    let again = against(host, &["chat", "talked-to", "--session", "a"]).await;
    let told = text(&again.stderr);
    assert!(told.starts_with("talking to talked-to; continuing session a: 1 turn, the last "), "{told}");
    let new = text(&against(host, &["chat", "talked-to", "--new"]).await.stderr);
    assert!(new.starts_with("talking to talked-to in the new session chat-1"), "{new}");
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!((said.matches("→ add(").count(), said.matches("← {\"sum\":").count()), (2, 2), "{said}");
    for session in ["a", "b"] {
        assert_eq!(host.get(&format!("/v1/agents/talked-to/sessions/{session}")).await.1["turns"], 1);
    }
}

#[tokio::test]
async fn deleting_an_agent_needs_confirmation_and_removes_it_for_all_commands() {
    let host = shared();
    assert_eq!(host.deploy_guest("noop", "short-lived", "").await.0, 201);
    for session in ["a", "b"] {
        assert_eq!(host.message("short-lived", session, "hello").await.0, 200);
    }
    let run = async |arguments: &[&str]| against(host, arguments).await;
    let unasked = run(&["delete", "short-lived"]).await;
    assert_eq!(unasked.status.code(), Some(2));
    assert!(text(&unasked.stderr).contains("--yes"), "{}", text(&unasked.stderr));
    assert_eq!(run(&["list", "short-lived"]).await.status.code(), Some(0));

    let deleted = run(&["delete", "short-lived", "--yes"]).await;
    assert_eq!(text(&deleted.stdout), "deleted short-lived with 2 sessions of yours\n");
    for arguments in
        [&["list", "short-lived"][..], &["chat", "short-lived"], &["delete", "short-lived", "--yes"]]
    {
        let refused = run(arguments).await;
        assert_eq!(refused.status.code(), Some(4), "{arguments:?}: {}", text(&refused.stdout));
        assert!(text(&refused.stderr).contains("agent_not_found"), "{}", text(&refused.stderr));
    }
    for agent in ["..", "a\nb"] {
        assert_eq!(run(&["delete", agent, "--yes"]).await.status.code(), Some(2), "{agent:?}");
    }
}

#[tokio::test]
async fn status_shows_the_host_on_one_screen() {
    let data = tempfile::tempdir().unwrap();
    let host = &Host::start(Some(data.path()));
    assert_eq!(host.deploy_guest("noop", "in-status", "").await.0, 201);
    assert_eq!(host.message("in-status", "s", "hello").await.0, 200);
    let screen = printed(host, &["status"]).await;
    assert!(screen.lines().count() <= 24 && screen.lines().all(|line| line.len() <= 140), "{screen}");
    let line = |label: &str| {
        let found = screen.lines().find(|line| line.starts_with(&format!("{label:<9} ")));
        found.unwrap_or_else(|| panic!("no {label} in\n{screen}"))[10..].to_owned()
    };
    assert!(line("host").starts_with(&format!("skep {} (", env!("CARGO_PKG_VERSION"))), "{screen}");
    assert_eq!(line("address"), host.url);
    assert!(line("model").starts_with(&format!("{MODEL} on cpu, context ")), "{screen}");
    assert!(line("agents").ends_with(" deployed") && line("sessions").contains(" active"), "{screen}");
    assert_eq!(line("queues"), "0 messages, 0 alarms, 0 events, 0 webhooks, 0 batches (0 requests)");
    assert_eq!(line("held"), "nothing");
    let disk = line("data");
    assert!(disk.starts_with("database ") && disk.ends_with(" free on the disk"), "{screen}");
    let in_memory = printed(shared(), &["status"]).await;
    let expected = format!("{:<9} in memory, lost when the host stops\n", "data");
    assert!(in_memory.contains(&expected), "{in_memory}");

    let status: Value = serde_json::from_str(&printed(host, &["status", "--json"]).await).unwrap();
    let answered = host.get("/v1/status").await.1;
    let names = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<BTreeSet<_>>();
    let all = names(&answered);
    assert_eq!(all, names(&status));
    assert!(status["sessions"]["total"].as_u64() >= Some(1), "{status}");

    let absent = skep(&["status", "--url", "http://127.0.0.1:9"]);
    assert_eq!(absent.status.code(), Some(3));
    assert!(text(&absent.stderr).contains("hint: start one with `skep up`"), "{}", text(&absent.stderr));
}

#[tokio::test]
async fn a_turn_is_found_by_its_id_and_by_its_number() {
    let host = shared();
    assert_eq!(host.deploy_guest("noop", "numbered", "").await.0, 201);
    let mut ids = Vec::new();
    for number in 1..=2 {
        let answer = printed(host, &["invoke", "numbered", "hello", "-s", "s", "--json"]).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert_eq!(answer["turn"], number);
        ids.push(answer["turn_id"].as_str().expect("the turn's id").to_owned());
    }
    for turn in [ids[1].as_str(), "2"] {
        let shown = printed(host, &["turn", "numbered", "s", turn, "--json"]).await;
        let shown: Value = serde_json::from_str(&shown).unwrap();
        let path = format!("/v1/agents/numbered/sessions/s/turns/{}", ids[1]);
        assert_eq!(shown, host.get(&path).await.1);
        for field in ["accepted_at_ms", "ended_at_ms", "usage", "timing", "text", "data", "turn_id"] {
            assert!(shown.get(field).is_some(), "no {field} in {shown}");
        }
    }
    assert!(
        printed(host, &["turn", "numbered", "s", "1"]).await.starts_with("done as turn 1 of its session\n")
    );
    let missing = against(host, &["turn", "numbered", "s", "3"]).await;
    assert_eq!(missing.status.code(), Some(4));
    assert!(text(&missing.stderr).contains("turn_not_found"), "{}", text(&missing.stderr));
}

#[tokio::test]
async fn every_empty_listing_says_so() {
    let host = Host::start(None);
    let commands: [(&[&str], &str); 10] = [
        (&["list"], "no agents yet"),
        (&["approval", "list"], "no calls wait"),
        (&["schedule", "list"], "no schedules"),
        (&["event", "list"], "no events yet"),
        (&["webhook", "list"], "no webhooks yet"),
        (&["webhook", "dead-letters"], "no dead letters"),
        (&["secret", "list"], "no secrets yet"),
        (&["key", "list"], "no keys yet"),
        (&["mcp", "list"], "no MCP servers"),
        (&["logs"], "no log lines"),
    ];
    for (command, expected) in commands {
        let said = printed(&host, command).await;
        assert!(said.starts_with(expected) && said.lines().count() == 1, "{command:?}: {said}");
        let json = printed(&host, &[command, &["--json"]].concat()).await;
        let expected = if command == ["logs"] { "" } else { "[]" };
        assert_eq!(json.trim_end(), expected, "{command:?}");
    }
    for kind in ["--versions", "--tools"] {
        assert!(printed(&host, &["list", kind]).await.starts_with("no agents yet"), "{kind}");
        assert_eq!(printed(&host, &["list", kind, "--json"]).await, "{}\n", "{kind}");
    }
    assert_eq!(host.deploy_guest("noop", "idle", "").await.0, 201);
    for (command, expected) in [
        (&["session", "list", "idle"][..], "no sessions of agent \"idle\"; "),
        (&["session", "list", "idle", "--after", "s"][..], "no sessions of agent \"idle\" after \"s\""),
        (&["schedule", "list", "idle"][..], "no schedules of agent \"idle\""),
        (&["list", "--tools", "idle"][..], "agent \"idle\" has no tools"),
        (&["logs", "idle", "--level", "error"][..], "no log lines of agent \"idle\""),
    ] {
        let said = printed(&host, command).await;
        assert!(said.starts_with(expected) && said.lines().count() == 1, "{command:?}: {said}");
    }
    assert_eq!(printed(&host, &["session", "list", "idle", "--json"]).await, "[]\n");
    host.stop();
}

#[test]
fn crates_of_the_same_name_in_a_shared_target_folder_are_built_separately() {
    let folder = tempfile::tempdir().unwrap();
    let build = |place: &str| {
        let dir = folder.path().join(place);
        let mut build = Command::new(env!("CARGO_BIN_EXE_skep"));
        build.arg("build").arg(&dir).env("CARGO_TARGET_DIR", folder.path().join("target"));
        let output = build.stdin(Stdio::null()).output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        std::fs::read(text(&output.stdout).trim_end()).unwrap()
    };
    for (place, mark) in [("one", "the first crate"), ("two", "the second crate")] {
        let source = folder.path().join(place).join("src");
        std::fs::create_dir_all(&source).unwrap();
        let manifest =
            "[package]\nname = \"twin\"\nedition = \"2021\"\n[lib]\ncrate-type = [\"cdylib\"]\n[workspace]\n";
        std::fs::write(folder.path().join(place).join("Cargo.toml"), manifest).unwrap();
        let library = format!("#[no_mangle]\npub static MARK: [u8; {}] = *b{mark:?};\n", mark.len());
        std::fs::write(source.join("lib.rs"), library).unwrap();
    }
    let has =
        |component: &[u8], mark: &str| component.windows(mark.len()).any(|part| part == mark.as_bytes());
    // The third build finds nothing changed, but the file of the second crate in its place.
    for (place, own, other) in [
        ("one", "the first crate", "the second crate"),
        ("two", "the second crate", "the first crate"),
        ("one", "the first crate", "the second crate"),
    ] {
        let component = build(place);
        assert!(has(&component, own) && !has(&component, other), "{place} got another crate's component");
    }
}
