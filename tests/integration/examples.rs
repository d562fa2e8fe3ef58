//! The examples on a real host, with the default model: each is deployed with its own manifest, under the settings of
//! its `skep.toml`, and used as its README says. Copies of them compile outside of the checkout.

use crate::{
    harness::{Host, repository},
    mcp,
};
use serde_json::{Value, json};
use skep_cli::{config::Config, embedded::EXAMPLES};
use std::{
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
    sync::OnceLock,
    time::Duration,
};

/// Longest wait for something that happens without a client, such as the delivery of an event.
const PATIENCE: Duration = Duration::from_secs(60);
/// Least number of fields of all invoices that have to be right. The README of the example has the measured figure.
const RIGHT_FIELDS: usize = 36;

fn folder(example: &str) -> PathBuf {
    repository().join("examples").join(example)
}

/// Returns the host that the examples share. Its operator grants what each of their `skep.toml` grants.
fn host() -> &'static Host {
    static HOST: OnceLock<Host> = OnceLock::new();
    HOST.get_or_init(|| {
        let mut all = Config::default();
        for example in ["two-agents", "http-secret", "mcp-both-ways"] {
            let one = Config::read(&folder(example).join("skep.toml")).unwrap();
            all.grants.tools.extend(one.grants.tools);
            all.mcp.extend(one.mcp);
            if example == "http-secret" {
                (all.grants.hosts, all.outbound) = (one.grants.hosts, one.outbound);
            }
        }
        let mut options = Host::options(None);
        all.apply(&mut options).unwrap();
        Host::start_with(options)
    })
}

async fn say(agent: &str, session: &str, text: &str) -> Value {
    host().ok(&format!("/v1/agents/{agent}/sessions/{session}/messages"), json!({ "text": text })).await
}

/// Asks until the answer satisfies the condition.
async fn until(path: &str, is_so: impl Fn(&Value) -> bool) -> Value {
    let wait = async {
        loop {
            let (_, answer) = host().get(path).await;
            if is_so(&answer) {
                return answer;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(PATIENCE, wait)
        .await
        .unwrap_or_else(|_| panic!("{path} never became what was expected"))
}

/// Runs a program with this standard input, in a folder, with the shared host as its host.
async fn run(program: &Path, arguments: &[&str], folder: &Path, input: &str) -> Output {
    use std::io::Write;
    let mut command = Command::new(program);
    command.args(arguments).current_dir(folder).env("SKEP_URL", &host().url).env("NO_COLOR", "1");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let input = input.to_owned();
    let work = move || {
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    tokio::task::spawn_blocking(work).await.unwrap()
}

/// Runs `skep` or `python3` and returns what it prints.
async fn prints(program: &str, arguments: &[&str], folder: &Path) -> String {
    let path = if program == "skep" { env!("CARGO_BIN_EXE_skep") } else { program };
    let output = run(Path::new(path), arguments, folder, "").await;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap()
}

#[tokio::test]
async fn events_go_from_a_customer_to_the_kitchen_and_back() {
    host().deploy_example("events").await;
    let answer = say("events", "ada", "A tea, please.").await;
    assert_eq!(
        (&answer["tool_calls"][0]["arguments"], &answer["data"]),
        (&json!({"dish": "tea"}), &json!([])),
        "{answer}"
    );
    let has = |key: &'static str| move |session: &Value| session["state_keys"].to_string().contains(key);
    until("/v1/agents/events/sessions/kitchen", has("cooked")).await;
    until("/v1/agents/events/sessions/ada", has("ready")).await;
    let answer = say("events", "ada", "I would like a pizza").await;
    assert_eq!(
        (&answer["tool_calls"][0]["result"], &answer["data"]),
        (&json!("a pizza"), &json!(["tea"])),
        "{answer}"
    );
}

#[tokio::test]
async fn a_refund_waits_for_a_person() {
    host().deploy_example("approval").await;
    for (session, order, decision, paid) in
        [("yes", 7, vec!["approve"], true), ("no", 8, vec!["deny", "--reason", "no receipt"], false)]
    {
        let messages = format!("/v1/agents/approval/sessions/{session}/messages?detach=true");
        let text = format!("Please refund 40 euros for order {order}.");
        let (status, accepted) = host().post(&messages, json!({ "text": text })).await;
        assert_eq!(status, 202, "{accepted}");
        let waits = |list: &Value| list["data"].to_string().contains(&format!("\"{session}\""));
        let list = until("/v1/approvals", waits).await;
        let asked = list["data"].as_array().unwrap().iter().find(|one| one["session"] == session).unwrap();
        assert_eq!(
            (&asked["tool"], &asked["arguments"]),
            (&json!("refund"), &json!({"order": order, "euros": 40}))
        );
        let id = asked["id"].as_str().unwrap();
        let arguments: Vec<&str> =
            ["approval", decision[0], id].into_iter().chain(decision[1..].iter().copied()).collect();
        prints("skep", &arguments, &folder("approval")).await;
        let turn = accepted["turn_id"].as_str().unwrap();
        let shown =
            prints("skep", &["turn", "approval", session, turn, "--follow"], &folder("approval")).await;
        assert!(shown.contains(if paid { "40 euros were refunded" } else { "no receipt" }), "{shown}");
        let (_, stored) = host().get(&format!("/v1/agents/approval/sessions/{session}")).await;
        assert_eq!(stored["state_keys"].as_array().map(Vec::len), Some(usize::from(paid)), "{stored}");
    }
}

#[tokio::test]
async fn an_agent_asks_another_agent() {
    host().deploy_example("two-agents").await;
    host().deploy_example("two-agents/warehouse").await;
    let answer = say("two-agents", "ada", "Where is my order 7?").await;
    assert_eq!(answer["tool_calls"][0]["result"], "7 is in Bergen and arrives in 2 days", "{answer}");
    let (_, called) = host().get("/v1/agents/warehouse/sessions/two-agents~ada").await;
    assert_eq!(called["turns"], 1, "{called}");
    let answer = say("two-agents", "ben", "Where is my order 9?").await;
    assert_eq!(answer["tool_calls"][0]["error"], "there is no order 9", "{answer}");
}

/// A server of an example, which is killed with the test.
struct Server(std::process::Child);

impl Server {
    /// Starts it, and waits until it listens.
    async fn start(script: &Path, address: &str) -> Server {
        assert!(
            tokio::net::TcpStream::connect(address).await.is_err(),
            "something else listens at {address}"
        );
        let mut child = Command::new("python3").arg(script).stderr(Stdio::null()).spawn().unwrap();
        while tokio::net::TcpStream::connect(address).await.is_err() {
            assert!(child.try_wait().unwrap().is_none(), "{} ended", script.display());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Server(child)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test]
async fn a_secret_reaches_the_server_and_not_the_agent() {
    const KEY: &str = "correct-horse-battery-staple";
    let _server = Server::start(&folder("http-secret").join("server.py"), "127.0.0.1:9473").await;
    host().deploy_example("http-secret").await;
    let set = ["secret", "set", "POST_KEY", "--to", "http://127.0.0.1:9473"];
    let output = run(Path::new(env!("CARGO_BIN_EXE_skep")), &set, Path::new("."), KEY).await;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));

    let answer = say("http-secret", "ada", "Where is parcel P7?").await;
    assert_eq!(answer["tool_calls"][0]["result"], "P7 is in Bergen", "{answer}");
    let (_, logs) = host().get("/v1/agents/http-secret/logs").await;
    let line = logs["data"][0]["message"].as_str().unwrap();
    assert!(line.starts_with("the server was sent Bearer secret.POST_KEY."), "{line}");
    assert!(!logs.to_string().contains(KEY) && !answer.to_string().contains(KEY));
    let answer = say("http-secret", "ben", "Where is parcel P9?").await;
    assert_eq!(answer["tool_calls"][0]["error"], "there is no parcel P9", "{answer}");
}

#[tokio::test]
async fn a_librarian_uses_an_mcp_server_and_is_one() {
    host().deploy_example("mcp-both-ways").await;
    let answer = say("mcp-both-ways", "ada", "Where is Dracula?").await;
    assert_eq!(answer["tool_calls"][0]["result"], "Dracula is on floor 3, shelf 31", "{answer}");

    let (client, _) = mcp::connect(host()).await;
    let found = mcp::call(&client, "mcp-both-ways__where_is", json!({"title": "Emma"})).await;
    assert_eq!(
        found.structured_content,
        Some(json!({"result": "Emma is on floor 1, shelf 12"})),
        "{found:?}"
    );
    let missing = mcp::call(&client, "mcp-both-ways__where_is", json!({"title": "Faust"})).await;
    assert_eq!(missing.is_error, Some(true), "{missing:?}");
    assert!(format!("{missing:?}").contains("the library has no book"), "{missing:?}");
}

#[tokio::test]
async fn fields_of_invoices_are_extracted() {
    host().deploy_example("extraction").await;
    let documents = folder("extraction").join("documents");
    let expected = std::fs::read_to_string(documents.join("expected.json")).unwrap();
    let expected: Value = serde_json::from_str(&expected).unwrap();
    let (mut right, mut all, mut wrong) = (0, 0, Vec::new());
    for (name, fields) in expected.as_object().unwrap() {
        let text = std::fs::read_to_string(documents.join(name).with_extension("txt")).unwrap();
        let data = say("extraction", name, &text).await["data"].clone();
        for (field, value) in fields.as_object().unwrap() {
            all += 1;
            right += usize::from(data[field] == *value);
            if data[field] != *value {
                wrong.push(format!("{name}: {field} is {} and not {value}", data[field]));
            }
        }
    }
    eprintln!("extraction: {right} of {all} fields are right");
    assert!(all >= 40 && right >= RIGHT_FIELDS, "{right} of {all} are right; wrong:\n{}", wrong.join("\n"));
}

#[tokio::test]
async fn each_hunk_of_a_diff_is_reviewed() {
    host().deploy_example("code-reviewer").await;
    let (folder, scratch) = (folder("code-reviewer"), tempfile::tempdir().unwrap());
    let path = |name: &str| scratch.path().join(name).display().to_string();
    let (hunks, reviews) = (path("hunks.jsonl"), path("reviews.jsonl"));
    std::fs::write(&hunks, prints("python3", &["hunks.py", "split", "change.diff"], &folder).await).unwrap();
    let batch = ["ai", "batch", &hunks, "--model", "agent:code-reviewer", "--wait", "--output", &reviews];
    prints("skep", &batch, &folder).await;
    let shown = prints("python3", &["hunks.py", "show", &reviews], &folder).await;
    let lines: Vec<&str> = shown.lines().collect();
    assert_eq!(lines.len(), 3, "{shown}");
    for (line, at) in lines.iter().zip([63, 92, 345]) {
        let said = line
            .strip_prefix(&format!("guest-sdk/src/testing/memory_host.rs:{at}: "))
            .unwrap_or_else(|| panic!("{shown}"));
        assert!(["fine: ", "question: ", "bug: "].iter().any(|verdict| said.starts_with(verdict)), "{shown}");
    }
}

#[tokio::test]
async fn lines_of_a_diff_that_look_like_headers_stay_in_their_hunks() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("odd.diff").display().to_string();
    let hunks = ["@@ -1,2 +1,2 @@\n--- all orders\n+-- orders\n \n", "@@ -9 +9,2 @@ f\n i;\n+++ i;\n"];
    let first = format!("--- a/a.sql\n+++ b/a.sql\n{}", hunks[0]);
    let second = format!("--- a/b.c\n+++ b/b.c\n{}\\ No newline at end of file\n", hunks[1]);
    std::fs::write(&path, first + &second).unwrap();
    let split = prints("python3", &["hunks.py", "split", &path], &folder("code-reviewer")).await;
    let requests: Vec<Value> = split.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let request = |file: &str, line: u32, hunk: &str| {
        let prompt = format!("{file}\n{}", hunk.trim_end());
        json!({"prompt": prompt, "external_reference": format!("{file}:{line}")})
    };
    assert_eq!(requests, [request("a.sql", 1, hunks[0]), request("b.c", 9, hunks[1])]);
}

/// Copies the examples out of the binary, under other names and away from the checkout, into one workspace, so that their
/// dependencies are compiled once, and runs the tests of all of them.
#[tokio::test]
async fn copies_of_all_examples_compile_and_pass_their_tests() {
    let scratch = tempfile::tempdir().unwrap();
    let work = scratch.path();
    let sdk = repository().join("guest-sdk").display().to_string();
    let mut members = Vec::new();
    for example in &EXAMPLES {
        let name = format!("my-{}", example.name);
        let said = prints("skep", &["new", &name, "--example", example.name, "--sdk", &sdk], work).await;
        assert!(
            said.starts_with(&format!("created {name} from the example {}; next:\n", example.name)),
            "{said}"
        );
        let manifest = work.join(&name).join("Cargo.toml");
        let text = std::fs::read_to_string(&manifest).unwrap();
        // A workspace cannot be in another one.
        let (package, _) = text.split_once("\n[workspace]\n").expect("each copy is a workspace");
        std::fs::write(&manifest, package).unwrap();
        members.push(name);
    }
    members.push("my-two-agents/warehouse".to_owned());
    std::fs::write(
        work.join("Cargo.toml"),
        format!("[workspace]\nresolver = \"3\"\nmembers = {members:?}\n"),
    )
    .unwrap();
    std::fs::copy(repository().join("Cargo.lock"), work.join("Cargo.lock")).unwrap();
    // The crates of the guides have the same dependencies.
    let target = Path::new(env!("CARGO_BIN_EXE_skep")).parent().unwrap().with_file_name("guides");
    let mut cargo = Command::new(env!("CARGO"));
    cargo.args(["test", "--workspace", "--lib", "--offline", "--quiet"]).current_dir(work);
    cargo.env("CARGO_TARGET_DIR", target).stdin(Stdio::null());
    let output = tokio::task::spawn_blocking(move || cargo.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(said.matches("test result: ok").count(), members.len(), "{said}");
}

#[tokio::test]
async fn an_unknown_example_is_refused_with_the_nearest_one() {
    let scratch = tempfile::tempdir().unwrap();
    let path = Path::new(env!("CARGO_BIN_EXE_skep"));
    let output = run(path, &["new", "mine", "--example", "aproval"], scratch.path(), "").await;
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && said.contains("similar value exists: 'approval'"), "{said}");
    assert!(!scratch.path().join("mine").exists());
    for shell in ["bash", "zsh", "fish"] {
        assert!(
            prints("skep", &["completions", shell], scratch.path()).await.contains("mcp-both-ways"),
            "{shell}"
        );
    }
    assert!(
        prints("skep", &["new", "--help"], scratch.path())
            .await
            .contains("a tool that a person approves first")
    );
}
