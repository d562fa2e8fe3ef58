//! Whole turns through the public interface, in the harness, covering the behavior that authors rely on.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use skep_sdk::testing::{Harness, ScriptedModel, block_on};
use skep_sdk::{
    AgentError, Alarm, Context, Entry, Event, HostToolError, InferenceError, Level, Message, Reply,
    StateError, ToolChoice, ToolError, agent, join, join_all, tool,
};

mod shop {
    use super::*;

    #[derive(Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    pub enum Size {
        Small,
        Large,
    }

    #[derive(Debug, Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    pub struct Item {
        pub name: String,
        pub size: Size,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    pub struct Receipt {
        #[schemars(range(max = 3))]
        pub count: u32,
    }

    /// Puts items into the basket.
    #[tool]
    pub async fn add(
        cx: &Context,
        /// The items to buy.
        #[schemars(length(min = 1))]
        mut items: Vec<Item>,
        note: Option<String>,
    ) -> Result<Receipt, ToolError> {
        items.retain(|item| item.name != "nothing");
        let before: u32 = cx.state().get_or_default("count")?;
        let count = before + items.len() as u32;
        cx.state().set("count", &count)?;
        if note.as_deref() == Some("refuse") {
            return Err("the shop is closed".into());
        }
        Ok(Receipt { count })
    }

    /// Tells the size that is in store.
    #[tool]
    pub fn size_in_store() -> Size {
        Size::Large
    }
}

/// A shop.
///
/// It sells things.
#[agent(tools = [shop::add, shop::size_in_store])]
async fn shopkeeper(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let conversation = cx.conversation().system("You keep a shop.").user(&message.text).max_rounds(3);
    match message.text.as_str() {
        "required" => conversation.tool_choice(ToolChoice::Required).run().await,
        "named" => conversation.tool_choice(ToolChoice::named("add")).run().await,
        "only size" => conversation.tools(["size_in_store"]).run().await,
        "unknown tool" => conversation.tools(["sell"]).run().await,
        _ => conversation.run().await,
    }
}

fn one(name: &str) -> Value {
    json!({"items": [{"name": name, "size": "small"}]})
}

#[test]
fn a_tool_definition_reflects_its_function() {
    let agent = shopkeeper();
    assert_eq!(agent.description(), "A shop.\n\nIt sells things.");
    let [add, size] = agent.tools().try_into().unwrap();
    assert_eq!((add.name.as_str(), add.description.as_str()), ("add", "Puts items into the basket."));
    assert_eq!(add.input_schema["required"], json!(["items"]));
    assert_eq!(add.input_schema["additionalProperties"], json!(false));
    assert_eq!(add.input_schema["properties"]["items"]["description"], "The items to buy.");
    assert_eq!(add.input_schema["properties"]["items"]["minItems"], 1);
    assert_eq!(add.output_schema["properties"]["count"]["maximum"], 3);
    assert_eq!(size.input_schema["additionalProperties"], json!(false));
    assert_eq!(size.output_schema["enum"], json!(["small", "large"]));
}

#[test]
fn calls_of_one_round_are_answered_in_order_and_reach_the_model() {
    let model = ScriptedModel::new().calls([("add", one("tea")), ("size_in_store", json!({}))]).text("Done.");
    let mut harness = Harness::new(shopkeeper).model(model);
    let outcome = harness.send("buy tea").unwrap();
    assert_eq!((outcome.generations, outcome.reply.text.as_str()), (2, "Done."));
    let results: Vec<_> =
        harness.prompts()[1].iter().filter(|entry| matches!(entry, Entry::Tool { .. })).cloned().collect();
    assert_eq!(
        results,
        [
            Entry::Tool { call_id: "call_1".into(), outcome: Ok(json!({"count": 1})) },
            Entry::Tool { call_id: "call_2".into(), outcome: Ok(json!("large")) },
        ]
    );
}

#[test]
fn a_tool_error_is_passed_to_the_model_and_the_turn_continues() {
    let mut arguments = one("tea");
    arguments["note"] = json!("refuse");
    let mut harness =
        Harness::new(shopkeeper).model(ScriptedModel::new().call("add", arguments).text("Sorry."));
    let outcome = harness.send("buy").unwrap();
    assert_eq!(outcome.tool_calls[0].outcome, Err("the shop is closed".to_owned()));
}

#[test]
fn a_required_call_leaves_the_later_rounds_to_the_model() {
    let model = ScriptedModel::new().call("add", one("a")).call("add", one("b")).text("Both.");
    assert_eq!(Harness::new(shopkeeper).model(model).send("required").unwrap().generations, 3);
}

#[test]
#[should_panic(expected = "allows no tool call")]
fn after_a_named_call_the_model_answers() {
    let model = ScriptedModel::new().call("add", one("a")).call("add", one("b"));
    let _ = Harness::new(shopkeeper).model(model).send("named");
}

#[test]
fn endless_calls_return_a_typed_error() {
    let model = (0..9).fold(ScriptedModel::new(), |model, _| model.call("size_in_store", json!({})));
    let mut harness = Harness::new(shopkeeper).model(model);
    assert_eq!(harness.send("go on").unwrap_err(), AgentError::TooManyRounds { limit: 3 });
    assert!(harness.conversation("main").is_empty());
}

#[test]
fn a_result_that_breaks_its_schema_fails_the_turn() {
    let items: Vec<Value> = (0..4).map(|_| json!({"name": "x", "size": "large"})).collect();
    let mut harness = Harness::new(shopkeeper)
        .model(ScriptedModel::new().call("add", json!({"items": items})).text("never"));
    match harness.send("four").unwrap_err() {
        AgentError::Inference(InferenceError::SchemaInvalid(why)) => assert!(why.contains("/count"), "{why}"),
        other => panic!("{other}"),
    }
    assert_eq!(harness.state::<u32>("count"), None);
}

#[test]
#[should_panic(expected = "this generation offers: [size_in_store]")]
fn a_script_cannot_call_a_tool_that_is_not_offered() {
    let _ = Harness::new(shopkeeper).model(ScriptedModel::new().call("add", one("a"))).send("only size");
}

#[test]
#[should_panic(expected = "/items/0/size is \"huge\"")]
fn a_script_cannot_break_the_schema_of_arguments() {
    let arguments = json!({"items": [{"name": "a", "size": "huge"}]});
    let _ = Harness::new(shopkeeper).model(ScriptedModel::new().call("add", arguments)).send("x");
}

#[test]
#[should_panic(expected = "requires a tool call")]
fn a_script_cannot_answer_where_a_call_is_required() {
    let _ = Harness::new(shopkeeper).model(ScriptedModel::new().text("no")).send("required");
}

#[test]
#[should_panic(expected = "no step left")]
fn a_script_that_is_too_short_panics() {
    let _ = Harness::new(shopkeeper).send("x");
}

#[test]
fn an_unknown_tool_name_is_an_invalid_argument() {
    let error = Harness::new(shopkeeper).send("unknown tool").unwrap_err();
    assert!(error.to_string().contains("no tool `sell`"), "{error}");
}

/// Uses everything that is not a tool.
#[agent]
async fn workbench(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    let state = cx.state();
    match message.text.as_str() {
        "cas" => {
            let first = state.compare_and_set("k", None, "a")?;
            let second = state.compare_and_set("k", None, "b")?;
            let third = state.compare_and_set("k", Some("a"), "c")?;
            Reply::json("", &[first, second, third])
        }
        "keys" => {
            (0..600).try_for_each(|index| state.set(&format!("n/{index:03}"), &index))?;
            state.set("other", &0)?;
            let deleted = (state.delete("n/000"), state.delete("n/000"));
            Reply::json("", &(state.keys("n/").len(), deleted))
        }
        "wrong type" => Ok(state.get::<u32>("k")?.map_or("none", |_| "some").into()),
        "stream" => {
            let mut stream = cx.conversation().user("go").stream().await?;
            let first = stream.next().await.unwrap_or_default();
            while stream.next().await.is_some() {}
            Reply::json(stream.finish().await?.text, &first)
        }
        "extract" => {
            let size: shop::Size = cx.conversation().user("size?").extract().await?;
            Ok(format!("{size:?}").into())
        }
        "join" => {
            let ask = |name: &str| cx.conversation_named(name).user("go").generate();
            let (a, b) = join(ask("a"), ask("b")).await;
            let c = join_all([ask("c"), ask("d")]).await;
            Ok(Reply::text(format!("{}{}{}", a?.text, b?.text, c.len())))
        }
        "fork" => {
            cx.conversation().user("base").generate().await?;
            cx.conversation().fork("side")?.user("aside").generate().await?;
            Reply::json(
                "",
                &[cx.conversation().messages()?.len(), cx.conversation_named("side").messages()?.len()],
            )
        }
        "bad model" => cx.conversation_with_model("x", "none").user("y").run().await,
        "complete" => Ok(cx.complete("Once upon").max_tokens(5).generate().await?.text.into()),
        "unanswered" => {
            cx.conversation().user("a").generate().await?;
            cx.conversation().tool_result("call_9", Ok(json!(1))).generate().await?;
            Ok("never".into())
        }
        "data" => Reply::json("", &message.json::<Vec<u8>>()?.len()),
        _ => {
            cx.log().warn(format!("{} {} {}", cx.session(), cx.turn(), cx.now_ms() > 0));
            Ok("logged".into())
        }
    }
}

fn bench(model: ScriptedModel) -> Harness {
    Harness::new(workbench).model(model).session("s1")
}

#[test]
fn state_supports_compare_and_set_paging_and_type_checks() {
    let mut harness = bench(ScriptedModel::new());
    assert_eq!(harness.send("cas").unwrap().reply.data, Some(json!([true, false, true])));
    assert_eq!(harness.state::<String>("k").as_deref(), Some("c"));
    assert_eq!(harness.send("keys").unwrap().reply.data, Some(json!([599, [true, false]])));
    match harness.send("wrong type").unwrap_err() {
        AgentError::State(StateError::Json { key, .. }) => assert_eq!(key, "k"),
        other => panic!("{other}"),
    }
}

#[test]
fn a_stream_yields_chunks_and_then_the_whole_text() {
    let outcome = bench(ScriptedModel::new().text("one two three")).send("stream").unwrap();
    assert_eq!((outcome.reply.text.as_str(), outcome.reply.data), ("one two three", Some(json!("one "))));
}

#[test]
fn structured_output_becomes_the_type() {
    assert_eq!(bench(ScriptedModel::new().json("large")).send("extract").unwrap().reply.text, "Large");
}

#[test]
#[should_panic(expected = "breaks the output's schema")]
fn scripted_output_that_breaks_its_schema_panics() {
    let _ = bench(ScriptedModel::new().json("huge")).send("extract");
}

#[test]
fn several_generations_can_be_awaited_at_once() {
    let model = ScriptedModel::new().text("1").text("2").text("3").text("4");
    assert_eq!(bench(model).send("join").unwrap().reply.text, "122");
}

#[test]
fn a_fork_diverges_from_its_origin() {
    let model = ScriptedModel::new().text("x").text("y");
    assert_eq!(bench(model).send("fork").unwrap().reply.data, Some(json!([2, 4])));
}

#[test]
fn a_conversation_reports_its_first_error_at_the_end_of_the_chain() {
    let error = bench(ScriptedModel::new()).send("bad model").unwrap_err();
    assert!(matches!(error, AgentError::Inference(InferenceError::ModelUnknown(_))), "{error}");
    let error = bench(ScriptedModel::new().text("x")).send("unanswered").unwrap_err();
    assert!(error.to_string().contains("call_9"), "{error}");
}

#[test]
fn completions_message_data_and_logs_work() {
    let mut harness = bench(ScriptedModel::new().text(" a time"));
    assert_eq!(harness.send("complete").unwrap().reply.text, " a time");
    assert_eq!(harness.prompts()[0], [Entry::User("Once upon".into())]);
    assert_eq!(harness.send_json("data", json!([1, 2])).unwrap().reply.data, Some(json!(2)));
    assert!(matches!(harness.send("data").unwrap_err(), AgentError::InvalidMessage(_)));
    harness.send("log").unwrap();
    assert_eq!(harness.logs(), [(Level::Warn, "s1 3 true".to_owned())]);
}

#[test]
fn waiting_futures_are_woken() {
    let (sender, receiver) = std::sync::mpsc::channel::<std::task::Waker>();
    let ready = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    let flag = ready.clone();
    let waking = std::thread::spawn(move || {
        let waker = receiver.recv().unwrap();
        flag.store(true, std::sync::atomic::Ordering::SeqCst);
        waker.wake();
    });
    let late = std::future::poll_fn(|cx| {
        if ready.load(std::sync::atomic::Ordering::SeqCst) {
            return std::task::Poll::Ready(1);
        }
        let _ = sender.send(cx.waker().clone());
        std::task::Poll::Pending
    });
    assert_eq!(block_on(join(late, async { 2 })), (1, 2));
    waking.join().unwrap();
}

#[test]
fn alarms_events_and_tool_calls_run_as_separate_turns() {
    async fn wake(cx: &mut Context, alarm: Alarm) -> Result<(), AgentError> {
        let minutes: u32 = alarm.json()?;
        cx.state().set("alarm", &format!("{} after {minutes} in turn {}", alarm.name, cx.turn()))?;
        Ok(())
    }

    async fn react(cx: &mut Context, event: Event) -> Result<(), AgentError> {
        cx.state().set("event", &event.topic)?;
        Err(AgentError::Failed("no".into()))
    }

    /// Doubles a number.
    #[tool]
    async fn double(cx: &Context, number: u32) -> u32 {
        let _ = cx.state().set("doubled", &number);
        number * 2
    }

    /// Waits.
    #[agent(tools = [double], on_alarm = wake, on_event = react)]
    async fn waiting(_cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        Ok(Reply::text(message.text))
    }

    let mut harness = Harness::new(waiting);
    harness.alarm("tea", Some(json!(4))).unwrap();
    assert_eq!(harness.state::<String>("alarm").unwrap(), "tea after 4 in turn 1");
    assert!(matches!(harness.alarm("tea", Some(json!("four"))), Err(AgentError::InvalidMessage(_))));
    assert!(harness.event("order.paid", None).is_err());
    assert_eq!(harness.state::<String>("event"), None, "a turn that fails leaves no trace");
    assert_eq!(harness.call_tool("double", json!({"number": 4})).unwrap(), json!(8));
    assert_eq!(harness.state::<u32>("doubled"), Some(4));
    assert!(harness.call_tool("triple", json!({})).unwrap_err().message().contains("triple"));

    /// Takes nothing but messages.
    #[agent]
    async fn plain(_cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
        Ok(Reply::text(message.text))
    }
    let error = Harness::new(plain).alarm("tea", None).unwrap_err().to_string();
    assert!(error.contains("on_alarm"), "{error}");
}

mod flaky {
    use super::*;

    /// Fails `failures` times, then returns the number of calls so far.
    #[tool(idempotent, retries = 2)]
    pub async fn shaky(cx: &Context, failures: u32) -> Result<u32, ToolError> {
        let calls: u32 = cx.state().get_or_default("calls")?;
        cx.state().set("calls", &(calls + 1))?;
        if calls < failures { Err(format!("failure {}", calls + 1).into()) } else { Ok(calls + 1) }
    }

    /// Pays.
    #[tool(needs_approval)]
    pub fn pay(cents: u32) -> u32 {
        cents
    }

    /// Takes the given number of seconds.
    #[tool(read_only, timeout_ms = 500)]
    pub async fn slow(cx: &Context, seconds: u64) -> Result<String, ToolError> {
        cx.sleep(std::time::Duration::from_secs(seconds)).await;
        Ok("slept".into())
    }
}

/// Calls tools that fail or take long.
#[agent(tools = [flaky::shaky, flaky::slow, flaky::pay])]
async fn patient(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    cx.conversation().user(message.text).run().await
}

#[test]
fn a_failed_tool_is_retried_up_to_its_limit() {
    for (failures, expected) in [(0, Ok(json!(1))), (2, Ok(json!(3))), (3, Err("failure 3".to_owned()))] {
        let model = ScriptedModel::new().call("shaky", json!({"failures": failures})).text("So.");
        let outcome = Harness::new(patient).model(model).send("go").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, expected, "{failures} failures");
    }
}

#[test]
fn a_tool_timeout_does_not_affect_other_calls_of_the_round() {
    let calls = [
        ("slow", json!({"seconds": 3600})),
        ("shaky", json!({"failures": 2})),
        ("slow", json!({"seconds": 0})),
    ];
    let outcome =
        Harness::new(patient).model(ScriptedModel::new().calls(calls).text("So.")).send("go").unwrap();
    let mut outcomes = outcome.tool_calls.into_iter().map(|call| call.outcome);
    let late = outcomes.next().unwrap().unwrap_err();
    assert!(late.contains("`slow` gave no result within 500 ms"), "{late}");
    assert_eq!(outcomes.collect::<Vec<_>>(), [Ok(json!(3)), Ok(json!("slept"))]);
}

#[test]
fn a_rejected_call_is_not_made_and_the_model_gets_the_reason() {
    for (decision, expected) in
        [(Ok(()), Ok(json!(7))), (Err("too dear"), Err("a person refused this call: too dear".to_owned()))]
    {
        let model = ScriptedModel::new().call("pay", json!({"cents": 7})).text("So.");
        let outcome = Harness::new(patient).model(model).approval_decision(decision).send("go").unwrap();
        assert_eq!(outcome.tool_calls[0].outcome, expected);
    }
}

#[test]
fn a_tool_definition_contains_its_hints() {
    let [shaky, slow, pay] = patient().tools().try_into().unwrap();
    assert!(pay.needs_approval && !slow.needs_approval);
    assert!(shaky.hints.idempotent && !shaky.hints.read_only && !shaky.hints.destructive);
    assert_eq!((shaky.retries, shaky.timeout_ms), (2, None));
    assert!(slow.hints.read_only && !slow.hints.idempotent);
    assert_eq!((slow.retries, slow.timeout_ms), (0, Some(500)));
}

/// Calls the orders' agent, by itself or through its model.
#[agent]
async fn desk(cx: &mut Context, message: Message) -> Result<Reply, AgentError> {
    if message.text == "itself" {
        let order: Value = cx.host_tools().call("agent:orders/find", &json!({"id": 7})).await?;
        return Reply::json("found", &order);
    }
    let names: Vec<&str> = message.text.split(' ').collect();
    cx.conversation().user("Where is it?").host_tools(names).run().await
}

fn with_orders(model: ScriptedModel) -> Harness {
    let schema = json!({"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]});
    Harness::new(desk).model(model).host_tool("agent:orders/find", schema, |arguments| match arguments["id"]
        .as_u64()
    {
        Some(7) => Ok(json!({"at": "sea"})),
        _ => Err(HostToolError::Failed("there is no such order".into())),
    })
}

#[test]
fn an_agent_calls_a_tool_of_another_agent_directly() {
    let outcome = with_orders(ScriptedModel::new()).send("itself").unwrap();
    assert_eq!(outcome.reply.data, Some(json!({"at": "sea"})));
    let denied = Harness::new(desk).send("itself").unwrap_err();
    assert!(denied.to_string().contains("no `agent:orders/find`"), "{denied}");
}

#[test]
fn host_tools_are_offered_to_the_model_under_valid_names() {
    for name in ["agent:orders/find", "agent:orders/*"] {
        let model = ScriptedModel::new()
            .calls([("agent_orders_find", json!({"id": 7})), ("agent_orders_find", json!({"id": 8}))])
            .text("At sea.");
        let outcome = with_orders(model).send(name).unwrap();
        let outcomes: Vec<_> = outcome.tool_calls.into_iter().map(|call| call.outcome).collect();
        assert_eq!(outcomes, [Ok(json!({"at": "sea"})), Err("there is no such order".to_owned())]);
    }
    let missing = with_orders(ScriptedModel::new()).send("agent:orders/find mcp:files/*").unwrap_err();
    assert!(missing.to_string().contains("`mcp:files/*`"), "{missing}");
}
