//! Sessions from the command line, and conversations that outgrow the model, with the default model.

use crate::harness::{Host, shared};
use serde_json::{Value, json};
use std::{
    io::Write,
    process::{Command, Stdio},
};

/// Runs `skep session …` against this host. Returns its exit code and its output.
async fn session(host: &Host, arguments: &[&str], input: &str) -> (i32, String, String) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.arg("session").args(arguments).args(["--url", &host.url]);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let input = input.to_owned();
    let run = move || {
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    };
    let output = tokio::task::spawn_blocking(run).await.unwrap();
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
    (output.status.code().unwrap(), text(output.stdout), text(output.stderr))
}

async fn done(host: &Host, arguments: &[&str], input: &str) -> String {
    let (code, stdout, stderr) = session(host, arguments, input).await;
    assert_eq!(code, 0, "{arguments:?}: {stderr}");
    stdout
}

async fn say(host: &Host, agent: &str, session: &str, text: &str, max_tokens: u32) -> Value {
    let body = json!({"text": text, "data": {"max_tokens": max_tokens, "temperature": 0}});
    host.ok(&format!("/v1/agents/{agent}/sessions/{session}/messages"), body).await
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

#[tokio::test]
async fn a_session_is_listed_shown_forked_moved_and_deleted_from_the_command_line() {
    let host = shared();
    assert_eq!(host.deploy_guest("generate", "keeper", "").await.0, 201);
    say(host, "keeper", "ada", "My name is Ada. Remember that, please, for as long as we talk.", 12).await;
    say(host, "keeper", "bob", "Hello", 4).await;

    let listed = done(host, &["list", "keeper"], "").await;
    assert!(listed.contains("SESSION") && listed.contains("ada") && listed.contains("bob"), "{listed}");
    let page: Value =
        serde_json::from_str(&done(host, &["list", "keeper", "-n", "1", "--json"], "").await).unwrap();
    assert_eq!((page.as_array().unwrap().len(), &page[0]["id"]), (1, &json!("ada")));
    let shown = done(host, &["show", "keeper", "ada", "-n", "1"], "").await;
    assert!(shown.contains("1 turn,") && shown.contains("My name is Ada."), "{shown}");

    let searched = done(host, &["search", "as", "LONG", "ada.", "--agent", "keeper"], "").await;
    let lines: Vec<&str> = searched.lines().collect();
    assert!(lines.len() == 2 && lines[1].starts_with("keeper  ada "), "{searched}");
    assert!(lines[1].ends_with("user: My name is Ada. Remember that, please, for as long as we talk."));
    let all = done(host, &["search", "hello", "--agent", "keeper", "--json"], "").await;
    let all: Value = serde_json::from_str(&all).unwrap();
    assert_eq!((&all[0]["id"], &all[0]["said"]["role"]), (&json!("bob"), &json!("user")), "{all}");
    let none = done(host, &["search", "suitcase", "--agent", "keeper"], "").await;
    assert_eq!(none, "no session has a message with all of these words\n");

    let counted = host.get("/v1/agents/keeper/sessions/ada/messages?tokens=true").await.1;
    assert!(counted["data"][0]["tokens"].as_u64() > Some(8), "{counted}");
    let uncounted = host.get("/v1/agents/keeper/sessions/ada/messages").await.1;
    assert!(uncounted["data"][0].get("tokens").is_none(), "{uncounted}");

    let forked = done(host, &["fork", "keeper", "ada", "what-if"], "").await;
    assert!(forked.contains("what-if is a copy of ada"), "{forked}");
    let answer = say(host, "keeper", "what-if", "What is my name?", 8).await;
    assert!(answer["turn"] == 2 && cached(&answer) > 16, "{answer}");
    let (code, _, refused) = session(host, &["fork", "keeper", "ada", "what-if"], "").await;
    assert!(code == 4 && refused.contains("session_exists"), "{refused}");

    let exported = done(host, &["export", "keeper", "ada"], "").await;
    let next = say(host, "keeper", "ada", "What is my name?", 8).await;
    let (code, _, stderr) = session(host, &["delete", "keeper", "ada"], "").await;
    assert!(code == 2 && stderr.contains("--yes"), "{stderr}");
    done(host, &["delete", "keeper", "ada", "--yes"], "").await;
    let (code, ..) = session(host, &["show", "keeper", "ada"], "").await;
    assert_eq!(code, 4);
    let imported = done(host, &["import", "keeper", "-"], &exported).await;
    assert!(imported.contains("imported ada with 1 turn\n"), "{imported}");
    let again = say(host, "keeper", "ada", "What is my name?", 8).await;
    assert_eq!(again["text"], next["text"], "the same tokens have the same continuation");
    let (code, _, stderr) = session(host, &["import", "keeper", "-"], &exported).await;
    assert!(code == 4 && stderr.contains("session_exists"), "{stderr}");
    done(host, &["import", "keeper", "-", "--replace"], &exported).await;

    assert_eq!(host.deploy_guest("generate", "keeper-2", "").await.0, 201);
    let (code, _, stderr) = session(host, &["import", "keeper-2", "-"], &exported).await;
    assert!(code == 4 && stderr.contains("--from-other-agent"), "{stderr}");
    done(host, &["import", "keeper-2", "-", "--from-other-agent"], &exported).await;
}

#[tokio::test]
async fn a_conversation_that_outgrows_its_pages_continues_from_a_summary() {
    let mut options = Host::options(None);
    options.executor.kv_tokens = Some(384);
    let host = Host::start_with(options);
    assert_eq!(host.deploy_guest("generate", "talker", "").await.0, 201);
    for turn in 1..=12 {
        say(&host, "talker", "s", &format!("Tell me something about the number {turn}."), 64).await;
        let (_, page) = host.get("/v1/agents/talker/sessions/s/messages?limit=3").await;
        let first = page["data"][0]["content"].as_str().unwrap();
        if first.starts_with("Summarise our conversation") {
            assert_eq!(page["data"][1]["role"], "assistant");
            let summary = page["data"][1]["content"].as_str().unwrap();
            assert!(!summary.is_empty() && page["total"].as_u64().unwrap() < 2 * turn, "{page}");
            return;
        }
    }
    panic!("twelve answers fit into 384 tokens");
}
