//! Tools of other agents over HTTP: an agent and its model call a tool of another agent, and the command line
//! shows tools.

use crate::harness::Host;
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// Starts a host with an agent that may call the tools of another.
async fn start() -> Host {
    let mut options = Host::options(None);
    options.runtime.granted_tools = vec!["agent:orders/*".to_owned().try_into().unwrap()];
    let host = Host::start_with(options);
    assert_eq!(host.deploy_guest("toolcall", "orders", "").await.0, 201);
    let grants = "[grants]\ntools = [\"agent:orders/*\"]";
    assert_eq!(host.deploy_guest("relay", "desk", grants).await.0, 201);
    host
}

async fn ask(host: &Host, session: &str, text: &str) -> Value {
    let path = format!("/v1/agents/desk/sessions/{session}/messages");
    host.ok(&path, json!({ "text": text })).await
}

#[tokio::test]
async fn an_agent_calls_another_agents_tool_and_replies_with_the_result() {
    let host = start().await;
    for turn in 1..=2 {
        let answer = ask(&host, "ada", r#"agent:orders/add {"a": 2, "b": 3}"#).await;
        assert_eq!(answer["text"], r#"{"sum":5}"#, "{answer}");
        let (_, session) = host.get("/v1/agents/orders/sessions/desk~ada").await;
        assert_eq!((&session["turns"], &session["state_keys"]), (&json!(turn), &json!(["sum"])), "{session}");
    }
    for (call, said) in [
        (r#"agent:orders/refuse {"colours": "red"}"#, "no red"),
        (r#"agent:orders/add {"a": 2, "b": 100}"#, "at \"/b\""),
        (r#"agent:orders/lie {"colour": "red"}"#, "the result of tool \"lie\" is not valid"),
        ("agent:orders/boom", "trapped"),
        ("agent:desk/add", "add \"agent:desk/add\" to `tools` under [grants] in agent.toml"),
    ] {
        let answer = ask(&host, "bob", call).await;
        assert!(answer["text"].as_str().unwrap().contains(said), "{call}: {answer}");
    }
}

#[tokio::test]
async fn a_model_calls_another_agents_tool_with_valid_arguments() {
    let host = start().await;
    let answer = ask(&host, "ada", "model agent:orders/add Add 2 and 3.").await;
    let [call] = answer["tool_calls"].as_array().unwrap().as_slice() else { panic!("{answer}") };
    assert_eq!(call["name"], "agent_orders_add", "{answer}");
    let (a, b) = (call["arguments"]["a"].as_i64().unwrap(), call["arguments"]["b"].as_i64().unwrap());
    assert_eq!(call["result"], json!({"sum": a + b}), "{answer}");
}

#[tokio::test]
async fn tools_are_listed_with_their_hints_and_approvals() {
    let host = start().await;
    let lines = "[tools.add]\napproval = true";
    assert_eq!(host.deploy_guest("toolcall", "strict", lines).await.0, 201);
    let list = async |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
        command.args(["list", "--tools", "--url", &host.url]).args(arguments).stdin(Stdio::null());
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let shown = list(&[]).await;
    let row = |agent: &str, tool: &str| {
        let row = shown
            .lines()
            .find(|row| row.starts_with(&format!("{agent} ")) && row.contains(&format!(" {tool} ")));
        row.unwrap_or_else(|| panic!("no {tool} in {shown}")).split_whitespace().collect::<Vec<_>>().join(" ")
    };
    assert_eq!(row("orders", "add"), "orders add idempotent Adds two numbers.");
    assert_eq!(row("strict", "add"), "strict add idempotent required Adds two numbers.");
    assert_eq!(row("orders", "pay"), "orders pay destructive, open world required Pays.");
    let listed: Value = serde_json::from_str(&list(&["strict", "--json"]).await).unwrap();
    let add = listed["strict"].as_array().unwrap().iter().find(|tool| tool["name"] == "add").unwrap();
    assert_eq!((&add["needs_approval"], &add["hints"]["idempotent"]), (&json!(true), &json!(true)), "{add}");
    let (_, over_http): (_, Value) = host.get("/v1/agents/strict").await;
    let of_http = over_http["tools"].as_array().unwrap().iter().find(|tool| tool["name"] == "add").unwrap();
    assert_eq!((&of_http["needs_approval"], &of_http["hints"]), (&json!(true), &add["hints"]));
}
