//! Typed references to tools that the host calls, from the view of an agent's author.

use serde::{Deserialize, Serialize};
use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{AgentError, Context, HostTool, HostToolError, Message, Reply, ToolError, agent, tool};

#[derive(Serialize, Deserialize)]
struct FindOrder {
    id: u32,
}

#[derive(Debug, Serialize, Deserialize)]
struct Order {
    at: String,
}

const FIND: HostTool<FindOrder, Order> = HostTool::new("agent:orders/find");
const COUNT: HostTool<(), u32> = HostTool::new("agent:orders/count");
const RAW: HostTool = HostTool::new("agent:orders/find");

/// Looks an order up at the other agent.
#[tool]
async fn lookup(cx: &Context, id: u32) -> Result<String, ToolError> {
    Ok(FIND.call(cx, FindOrder { id }).await?.at)
}

/// Calls the orders' agent.
#[agent(tools = [lookup])]
async fn desk(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    match message.text.as_str() {
        "count" => Ok(COUNT.call(cx, ()).await?.to_string().into()),
        "raw" => Reply::json("", &RAW.call(cx, json!({"id": 7})).await?),
        "model" => cx.conversation().user("Where?").host_tools([FIND.offer(), COUNT.offer()]).run().await,
        "own tool" => Ok(lookup(cx, 8).await?.into()),
        "ask" => cx.conversation().user("Where?").run().await,
        id => {
            let id = id.parse().map_err(|_| AgentError::InvalidMessage("send a number".into()))?;
            let find = FindOrder { id };
            Ok(FIND.call(cx, &find).await?.at.into())
        }
    }
}

fn with_orders(model: ScriptedModel) -> Harness {
    let find = |find: FindOrder| match find.id {
        7 => Ok(Order { at: "sea".into() }),
        _ => Err(HostToolError::Failed("there is no such order".into())),
    };
    Harness::new(desk).model(model).typed_host_tool(FIND, find).typed_host_tool(COUNT, |()| Ok(1))
}

#[test]
fn arguments_and_outcomes_have_their_types() {
    let mut harness = with_orders(ScriptedModel::new());
    for (text, expected) in [("7", "sea"), ("count", "1")] {
        assert_eq!(harness.send(text).unwrap().reply.text, expected);
    }
    assert_eq!(harness.send("raw").unwrap().reply.data, Some(json!({"at": "sea"})));
}

#[test]
fn the_cause_of_a_failed_turn_can_be_matched() {
    let failed = || HostToolError::Failed("there is no such order".into());
    let mut harness = with_orders(ScriptedModel::new());
    assert_eq!(harness.send("8").unwrap_err(), AgentError::HostTool(failed()));
    let own = harness.send("own tool").unwrap_err();
    assert_eq!(own, AgentError::Tool(ToolError::from(failed())));
    assert_eq!(own.to_string(), "there is no such order");
    match Harness::new(desk).send("7").unwrap_err() {
        AgentError::HostTool(HostToolError::Denied(why)) => {
            assert!(why.contains("agent:orders/find"), "{why}")
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_result_of_another_type_is_an_error_that_names_the_tool() {
    let schema = json!({"type": "object"});
    let mut harness = Harness::new(desk).host_tool(FIND.name(), schema, |_| Ok(json!({"on": "land"})));
    match harness.send("7").unwrap_err() {
        AgentError::HostTool(HostToolError::Json(why)) => {
            assert!(why.contains("the result of agent:orders/find") && why.contains("`at`"), "{why}");
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_model_may_call_typed_tools() {
    let calls = [("agent_orders_find", json!({"id": 7})), ("agent_orders_count", json!({}))];
    let model = ScriptedModel::new().calls(calls).text("At sea.");
    let outcome = with_orders(model).send("model").unwrap();
    let outcomes: Vec<_> = outcome.tool_calls.into_iter().map(|call| call.outcome).collect();
    assert_eq!(outcomes, [Ok(json!({"at": "sea"})), Ok(json!(1))]);
}

#[test]
fn a_tool_passes_the_error_of_a_host_tool_to_the_model() {
    let model = ScriptedModel::new().call("lookup", json!({"id": 8})).text("It is lost.");
    let outcome = with_orders(model).send("ask").unwrap();
    assert_eq!(outcome.tool_calls[0].outcome, Err("there is no such order".to_owned()));
}

/// Offers tools of each kind to the model.
#[agent]
async fn curious(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let tools = ["http/fetch", "mcp:files/read", "agent:orders/find"];
    cx.conversation().user(message.text).host_tools(tools).run().await
}

#[test]
fn the_model_sees_the_names_that_a_host_gives() {
    let calls = ["host_fetch", "mcp_files_read", "agent_orders_find"].map(|name| (name, json!({})));
    let mut harness = Harness::new(curious).model(ScriptedModel::new().calls(calls).text("Done."));
    for name in ["http/fetch", "mcp:files/read", "agent:orders/find"] {
        harness = harness.host_tool(name, json!({"type": "object"}), move |_| Ok(json!(name)));
    }
    let outcome = harness.send("go").unwrap();
    let outcomes: Vec<_> = outcome.tool_calls.into_iter().map(|call| call.outcome).collect();
    assert_eq!(outcomes, ["http/fetch", "mcp:files/read", "agent:orders/find"].map(|name| Ok(json!(name))));
}
