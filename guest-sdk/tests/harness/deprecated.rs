//! Names that methods had before. They work until they are removed.

#![allow(deprecated)]

use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, CompactionPolicy, Context, Entry, Message, Output, Reply, agent, tool};

/// Pays.
#[tool(needs_approval)]
fn pay(cents: u32) -> u32 {
    cents
}

/// Uses deprecated methods.
#[agent(tools = [pay])]
async fn old_names(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let chat = cx.conversation().user(message.text).compaction(CompactionPolicy::Off).stop("\n");
    chat.answer_form(|results| Output::JsonSchema(json!({"const": results.len()}))).run().await
}

#[test]
fn deprecated_methods_still_work() {
    let model = ScriptedModel::new().call("pay", json!({"cents": 7})).json(&1);
    let mut harness = Harness::new(old_names).model(model).verdict(Err("too expensive"));
    let outcome = harness.send("Pay").unwrap();
    assert_eq!(outcome.reply.text, "1");
    assert_eq!(outcome.tool_calls[0].outcome, Err("a person refused this call: too expensive".to_owned()));
    assert_eq!(harness.conversation("main")[0], Entry::User("Pay".to_owned()));
}
