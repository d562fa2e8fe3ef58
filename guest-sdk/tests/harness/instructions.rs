//! Agents without a function: `#[agent(instructions = …)]` on a unit struct.

use serde::{Deserialize, Serialize};
use serde_json::json;
use skep_sdk::testing::{Harness, ScriptedModel};
use skep_sdk::{
    AgentError, Alarm, Context, Entry, HostTool, HostToolError, InferenceError, Message, Reply, ToolError,
    agent, tool,
};

const INSTRUCTIONS: &str = "You answer questions about orders.";

const MAX_TOKENS: u32 = 200;

#[derive(Serialize, Deserialize)]
struct FindParcel {
    order: u32,
}

#[derive(Debug, Serialize, Deserialize, PartialEq)]
struct Parcel {
    at: String,
}

const FIND_PARCEL: HostTool<FindParcel, Parcel> = HostTool::new("agent:post/find_parcel");

mod desk {
    use super::*;

    /// Looks up an order by its number.
    #[tool(read_only)]
    pub fn find_order(id: u32) -> Result<String, ToolError> {
        if id == 7 { Ok("shipped".into()) } else { Err(format!("there is no order {id}").into()) }
    }

    pub async fn remind(cx: &mut Context, alarm: Alarm) -> Result<(), AgentError> {
        Ok(cx.state().set("reminded", &alarm.name)?)
    }

    /// Answers questions about orders.
    ///
    /// It knows where parcels are.
    #[agent(
        instructions = INSTRUCTIONS,
        model = "qwen3-8b",
        temperature = 0.2,
        max_tokens = MAX_TOKENS,
        tools = [find_order],
        host_tools = [FIND_PARCEL, "mcp:files/*"],
        on_alarm = remind,
    )]
    pub struct Orders;

    /// Answers questions.
    #[agent(instructions = concat!("Be", " kind.\n"))]
    struct Plain;
}
use desk::{Orders, Plain};

fn orders(model: ScriptedModel) -> Harness {
    let find = |find: FindParcel| match find.order {
        7 => Ok(Parcel { at: "sea".into() }),
        _ => Err(HostToolError::Failed("unknown".into())),
    };
    let schema = json!({"type": "object"});
    Harness::new(Orders).model(model).typed_host_tool(FIND_PARCEL, find).host_tool(
        "mcp:files/read",
        schema,
        |_| Ok(json!("text")),
    )
}

fn said(text: &str) -> Entry {
    Entry::Assistant { text: text.to_owned(), tool_calls: Vec::new() }
}

#[test]
fn the_struct_becomes_an_agent() {
    let agent = Orders();
    assert_eq!(agent.name(), "Orders");
    assert_eq!(agent.description(), "Answers questions about orders.\n\nIt knows where parcels are.");
    assert_eq!((agent.model(), Plain().model()), (Some("qwen3-8b"), None));
    assert_eq!(agent.tools()[0].name, "find_order");
}

#[test]
fn a_session_has_one_conversation_with_the_instructions_first() {
    let mut harness = Harness::new(Plain).model(ScriptedModel::new().text("Hello.").text("Bye."));
    assert_eq!(harness.send("Hi").unwrap().reply.text, "Hello.");
    assert_eq!(harness.send("Thanks").unwrap().reply.text, "Bye.");
    let user = |text: &str| Entry::User(text.to_owned());
    let system = Entry::System("Be kind.".to_owned());
    assert_eq!(
        harness.conversation("main"),
        [system, user("Hi"), said("Hello."), user("Thanks"), said("Bye.")]
    );
}

#[test]
fn the_model_calls_own_tools_and_host_tools_until_it_answers() {
    let model = ScriptedModel::new()
        .calls([("find_order", json!({"id": 7})), ("find_order", json!({"id": 8}))])
        .calls([("agent_post_find_parcel", json!({"order": 7})), ("mcp_files_read", json!({}))])
        .text("At sea.");
    let outcome = orders(model).send("Where is order 7?").unwrap();
    assert_eq!((outcome.reply.text.as_str(), outcome.generations), ("At sea.", 3));
    let outcomes: Vec<_> = outcome.tool_calls.into_iter().map(|call| call.outcome).collect();
    let missing = Err("there is no order 8".to_owned());
    assert_eq!(outcomes, [Ok(json!("shipped")), missing, Ok(json!({"at": "sea"})), Ok(json!("text"))]);
}

#[test]
fn data_of_a_message_reaches_the_model() {
    let model = ScriptedModel::new().text("One.").text("Two.").text("Three.");
    let mut harness = Harness::new(Plain).model(model);
    harness.send_json("Sum up", json!({"a": 1})).unwrap();
    harness.send_json("", json!([2])).unwrap();
    harness.send_json("Why?", json!({"text": "Why?"})).unwrap();
    let asked: Vec<Entry> = harness.conversation("main").into_iter().skip(1).step_by(2).collect();
    assert!(matches!(harness.send("").unwrap_err(), AgentError::InvalidMessage(_)));
    assert_eq!(asked, ["Sum up\n\n{\"a\":1}", "[2]", "Why?"].map(|text| Entry::User(text.to_owned())));
}

#[test]
fn a_failed_turn_leaves_no_message() {
    let busy = InferenceError::Busy { retry_after_ms: 100 };
    let mut harness = Harness::new(Plain).model(ScriptedModel::new().fail(busy.clone()));
    assert_eq!(harness.send("Hi").unwrap_err(), AgentError::Inference(busy));
    assert!(harness.conversation("main").is_empty());
}

#[test]
fn alarms_and_tool_calls_of_others_work() {
    let mut harness = orders(ScriptedModel::new());
    harness.alarm("tea", None).unwrap();
    assert_eq!(harness.state::<String>("reminded").as_deref(), Some("tea"));
    assert_eq!(harness.call_tool("find_order", json!({"id": 7})).unwrap(), json!("shipped"));
    let error = Harness::new(Plain).alarm("tea", None).unwrap_err().to_string();
    assert!(error.contains("on_alarm"), "{error}");
}

#[test]
fn the_model_of_the_attribute_is_the_model_of_the_turn() {
    /// Names its model.
    #[agent(model = "qwen3-8b")]
    async fn named(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        let models: Vec<String> = cx.models().into_iter().map(|model| model.name).collect();
        assert_eq!(models, ["qwen3-8b"]);
        cx.complete("Once").generate().await?;
        if message.text == "other" {
            return cx.conversation_with_model("side", "other").user("go").run().await;
        }
        cx.conversation().user(message.text).run().await
    }
    let model = ScriptedModel::new().text("upon").text("Hi.").text("upon");
    let mut harness = Harness::new(named).model(model);
    assert_eq!(harness.send("Hello").unwrap().reply.text, "Hi.");
    let error = harness.send("other").unwrap_err();
    assert!(matches!(error, AgentError::Inference(InferenceError::ModelUnknown(_))), "{error}");
}
