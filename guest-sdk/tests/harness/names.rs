//! Names of an author that a macro could use, too. Without care in the macros, this file does not compile.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, Alarm, Context, Event, Message, Reply, ToolError, agent, tool};

const TOOLS: &str = "You use tools.";

#[derive(Deserialize, JsonSchema)]
struct Arguments {
    amount: u32,
}

#[derive(Serialize, JsonSchema)]
struct Returned {
    ordered: String,
}

/// Orders something.
#[tool]
fn order(order: String, arguments: Arguments) -> Returned {
    Returned { ordered: format!("{} {order}", arguments.amount) }
}

/// Returns the area of a circle.
#[tool]
async fn circle(context: &Context, cx: f64, r#type: Option<String>) -> Result<f64, ToolError> {
    context.state().set("type", &r#type)?;
    Ok(cx * cx * 3.0)
}

/// Calls somebody.
#[tool]
async fn call(cx: &Context, call: String) -> Result<(), ToolError> {
    Ok(cx.state().set("called", &call)?)
}

async fn alarm(cx: &mut Context, alarm: Alarm) -> Result<(), AgentError> {
    Ok(cx.state().set("alarm", &alarm.name)?)
}

async fn event(cx: &mut Context, event: Event) -> Result<(), AgentError> {
    Ok(cx.state().set("event", &event.topic)?)
}

/// Takes turns.
#[agent(tools = [order, circle, call], on_alarm = alarm, on_event = event)]
async fn turn(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    cx.conversation().user(message.text).run().await
}

/// Repeats messages.
#[agent]
fn message(_: &mut Context, message: Message) -> Result<Reply, AgentError> {
    Ok(Reply::text(message.text))
}

/// Answers.
#[agent(instructions = TOOLS, tools = [call])]
struct Component;

#[test]
fn names_of_the_macros_are_free_for_authors() {
    let model = ScriptedModel::new()
        .call("order", json!({"order": "teas", "arguments": {"amount": 2}}))
        .call("circle", json!({"cx": 2.0, "type": "disc"}))
        .call("call", json!({"call": "Ann"}))
        .text("Done.");
    let mut harness = Harness::new(turn).model(model);
    let outcome = harness.send("Go").unwrap();
    let results: Vec<_> = outcome.tool_calls.into_iter().map(|call| call.outcome).collect();
    assert_eq!(results, [Ok(json!({"ordered": "2 teas"})), Ok(json!(12.0)), Ok(json!(null))]);
    harness.alarm("noon", None).unwrap();
    harness.event("door.opened", None).unwrap();
    for (key, expected) in [("type", "disc"), ("called", "Ann"), ("alarm", "noon"), ("event", "door.opened")]
    {
        assert_eq!(harness.state::<String>(key).as_deref(), Some(expected));
    }
    assert_eq!(Harness::new(message).send("Hello").unwrap().reply.text, "Hello");
    let mut harness = Harness::new(Component).model(ScriptedModel::new().text("Yes."));
    assert_eq!(harness.send("Well?").unwrap().reply.text, "Yes.");
}

#[test]
fn names_of_the_macros_are_not_shown_to_models() {
    let tools = turn().tools();
    let arguments = json!({"order": {"type": "string"}, "arguments": {
        "type": "object",
        "properties": {"amount": {"type": "integer", "minimum": 0}},
        "required": ["amount"],
    }});
    assert_eq!(
        tools[0].input_schema,
        json!({
            "type": "object",
            "properties": arguments,
            "required": ["order", "arguments"],
            "additionalProperties": false,
        })
    );
    assert!(tools.iter().all(|tool| !tool.output_schema.to_string().contains("__")));
    let error = Harness::new(turn).call_tool("order", json!(7)).unwrap_err();
    assert!(error.message().ends_with("expected struct Arguments"), "{}", error.message());
}
