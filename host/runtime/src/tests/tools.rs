//! Tests of tools of others: who may call which, and which calls are made once or repeated.

use super::{
    fixture::{Host, Setup, invocation},
    guest::Guest,
};
use crate::{
    Invocation, Origin, RuntimeOptions, ServedTool, ToolGrant, ToolHints, ToolOrigin, ToolServer,
    ToolServerError, TurnPhase,
};
use serde_json::{Value, json};
use std::{
    future::ready,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};
use tokio::sync::Notify;

/// Calls the tool that the message names with `{"id":1}`, and replies with the result or with the
/// error's text.
pub(super) fn caller() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/tools@0.1.1" "call" (func $call (param i32 i32 i32 i32 i32 i32 i32)))
            (data (i32.const 512) "{\"id\":1}")"#,
        on_message: r#"
            (call $call (local.get $text) (local.get $length) (i32.const 512) (i32.const 8)
                (i32.const 0) (i32.const 0) (i32.const 600))
            (local.set $a (i32.add (i32.const 604) (i32.mul (i32.const 4) (i32.load8_u (i32.const 600)))))
            (local.set $text (i32.load (local.get $a)))
            (local.set $length (i32.load offset=4 (local.get $a)))"#,
        ..Guest::default()
    }
}

const CALL_TOOL: &str = r#"
    (func (export "skep:agent/tool-handler@0.1.1#call-tool")
        (param $name i32) (param $n i32) (param $arguments i32) (param $length i32) (param i32 i32 i64 i64) (result i32)
        (local $text i32) (local $a i32) (local $b i32)
        (local.set $text (local.get $arguments))
        {body}
        (i32.store8 (i32.const 1600) (i32.const 0))
        (i32.store (i32.const 1604) (local.get $text))
        (i32.store (i32.const 1608) (local.get $length))
        (i32.const 1600))"#;

/// Returns an agent with the tool `find`, which takes an object with an integer `id`. `body` has the locals
/// `$text` and `$length`, which hold first the arguments and finally the result, and the free
/// locals `$a` and `$b`.
pub(super) fn finder(imports: &str, body: &str, timeout_ms: u32) -> Guest {
    let strings = [
        (1_700, "find"),
        (1_710, "Finds."),
        (1_720, r#"{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"]}"#),
        (1_900, r#"{"type":"object"}"#),
    ];
    let mut record = Vec::new();
    for (at, text) in &strings[..3] {
        record.extend([*at, text.len() as u32]);
    }
    record.extend([1, 1_900, strings[3].1.len() as u32, 0, u32::from(timeout_ms > 0), timeout_ms, 0, 0]);
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("\\{byte:02x}")).collect::<String>();
    let words = |words: &[u32]| hex(&words.iter().flat_map(|word| word.to_le_bytes()).collect::<Vec<_>>());
    let data =
        strings.iter().map(|(at, text)| format!("(data (i32.const {at}) \"{}\")", hex(text.as_bytes())));
    let module = format!(
        "{imports} {} {} (data (i32.const 72) \"{}\") (data (i32.const 2000) \"{}\")",
        CALL_TOOL.replace("{body}", body),
        data.collect::<String>(),
        words(&[2_000, 1]),
        words(&record),
    );
    let world = "export skep:agent/tool-handler@0.1.1;";
    Guest { world, module: module.leak(), ..caller() }.with_imports_first(imports)
}

impl Guest {
    /// Puts the imports first, as a module requires.
    fn with_imports_first(self, imports: &str) -> Guest {
        let (caller, body) =
            (caller(), self.module.strip_prefix(imports).expect("the module starts with its imports"));
        let module = format!("{imports} {} {body}", caller.module);
        Guest { module: module.leak(), ..self }
    }
}

pub(super) fn echoing() -> Guest {
    finder("", "", 0)
}

/// Returns options of an operator who grants these tools.
pub(super) fn granting(tools: &[&str]) -> RuntimeOptions {
    let grant = |text: &&str| ToolGrant::try_from(text.to_string()).expect("a grant");
    RuntimeOptions { granted_tools: tools.iter().map(grant).collect(), ..RuntimeOptions::default() }
}

async fn start() -> Host {
    Host::with(granting(&["agent:*/*"])).await
}

pub(super) fn granted(tools: &str) -> String {
    format!("[grants]\ntools = [{tools}]")
}

#[tokio::test]
async fn a_tool_call_runs_in_a_session_of_the_called_agent() {
    let host = start().await;
    host.deploy("orders", "", echoing()).await.expect("valid");
    host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    for turn in 1..=2 {
        assert_eq!(host.answer("desk", "room-7", "agent:orders/find").await, r#"{"id":1}"#);
        let session = host.agents.session("orders", "desk~room-7").await.expect("the callee has a session");
        assert_eq!(session.summary.turns, turn);
    }
    let long = "x".repeat(128);
    assert_eq!(host.answer("desk", &long, "agent:orders/find").await, r#"{"id":1}"#);
}

#[tokio::test]
async fn denied_and_missing_tools_are_reported_by_name() {
    let host = Host::with(granting(&["agent:orders/*"])).await;
    host.deploy("orders", "", echoing()).await.expect("valid");
    host.deploy("poor", "", caller()).await.expect("valid");
    let grants = granted("\"agent:orders/*\", \"agent:other/find\", \"agent:deaf/find\", \"mcp:files/read\"");
    host.deploy("rich", &grants, caller()).await.expect("valid");
    for (agent, tool, expected) in [
        ("poor", "agent:orders/find", "to `tools` under [grants] in agent.toml"),
        ("rich", "agent:other/find", "to `tools` under [grants] in skep.toml"),
        ("rich", "mcp:files/read", "in skep.toml"),
        ("rich", "agent:orders/lose", "there is no tool agent:orders/lose; available tools: find"),
        ("rich", "lose", "is not a valid tool name"),
    ] {
        let answer = host.answer(agent, "s", tool).await;
        assert!(answer.contains(expected), "{agent} {tool}: {answer}");
    }
}

#[tokio::test]
async fn missing_agents_and_missing_exports_are_reported_by_name() {
    let host = start().await;
    host.deploy("deaf", "", caller()).await.expect("valid");
    host.deploy("desk", &granted("\"agent:deaf/find\", \"agent:gone/find\""), caller()).await.expect("valid");
    for (tool, expected) in [
        ("agent:deaf/find", "lacks the export skep:agent/tool-handler"),
        ("agent:gone/find", "agent \"gone\" is not deployed"),
    ] {
        let answer = host.answer("desk", "s", tool).await;
        assert!(answer.contains(expected), "{tool}: {answer}");
    }
}

#[tokio::test]
async fn arguments_and_results_are_validated_against_the_schemas() {
    let host = start().await;
    let number = "(data (i32.const 1500) \"17\")";
    let liar = finder("", "(local.set $text (i32.const 1500)) (local.set $length (i32.const 2))", 0);
    let liar = Guest { module: format!("{} {number}", liar.module).leak(), ..liar };
    host.deploy("liar", "", liar).await.expect("valid");
    let picky = echoing();
    let picky = Guest { module: picky.module.replace("\\69\\64", "\\6e\\6f").leak(), ..picky };
    host.deploy("picky", "", picky).await.expect("valid");
    host.deploy("desk", &granted("\"agent:liar/*\", \"agent:picky/*\""), caller()).await.expect("valid");
    let answer = host.answer("desk", "s", "agent:liar/find").await;
    assert!(answer.contains("the result of tool \"find\" is not valid"), "{answer}");
    let answer = host.answer("desk", "s", "agent:picky/find").await;
    assert!(answer.contains("the arguments for tool \"find\" are not valid"), "{answer}");
    let untouched = host.agents.session("picky", "desk~s").await.expect_err("the tool was never called");
    assert_eq!(untouched.code(), "session_not_found");
}

/// Calls another agent's tool `find`, and returns its result or its error.
pub(super) fn relay(to: &str) -> Guest {
    let name = format!("agent:{to}/find");
    let body = format!(
        r#"(call $call (i32.const 3000) (i32.const {}) (i32.const 512) (i32.const 8) (i32.const 0) (i32.const 0)
               (i32.const 600))
           (if (i32.load8_u (i32.const 600)) (then
               (i32.store8 (i32.const 1600) (i32.const 1))
               (i32.store (i32.const 1604) (i32.load (i32.const 608)))
               (i32.store (i32.const 1608) (i32.load (i32.const 612)))
               (return (i32.const 1600))))
           (local.set $text (i32.load (i32.const 604)))
           (local.set $length (i32.load (i32.const 608)))"#,
        name.len()
    );
    let guest = finder("", &body, 0);
    Guest { module: format!("{} (data (i32.const 3000) \"{name}\")", guest.module).leak(), ..guest }
}

#[tokio::test]
async fn circular_calls_fail_instead_of_waiting_forever() {
    let host = start().await;
    host.deploy("a", &granted("\"agent:a/find\", \"agent:b/find\""), relay("b")).await.expect("valid");
    host.deploy("b", &granted("\"agent:a/find\""), relay("a")).await.expect("valid");
    let itself = host.answer("a", "s", "agent:a/find").await;
    assert!(itself.contains("would wait for itself: a → a"), "{itself}");
    let circle = host.answer("a", "s", "agent:b/find").await;
    assert!(circle.contains("would wait for itself: a → b → a"), "{circle}");
}

#[tokio::test]
async fn the_depth_of_nested_calls_is_limited() {
    let host = start().await;
    let name = |level: usize| format!("level-{level}");
    host.deploy(&name(9), "", echoing()).await.expect("valid");
    for level in 0..9 {
        let next = name(level + 1);
        host.deploy(&name(level), &granted(&format!("\"agent:{next}/find\"")), relay(&next))
            .await
            .expect("valid");
    }
    assert_eq!(host.answer("level-1", "s", "agent:level-2/find").await, r#"{"id":1}"#);
    let deeper = host.answer("level-0", "s", "agent:level-1/find").await;
    assert!(deeper.contains("at most 8 levels deep"), "{deeper}");
}

#[tokio::test]
async fn a_tool_call_that_times_out_cancels_the_called_turn() {
    let host = start().await;
    host.deploy("slow", "[limits]\ncpu_ms = 30000", finder("", "(loop $again (br $again))", 50))
        .await
        .expect("valid");
    host.deploy("desk", &granted("\"agent:slow/find\""), timed_caller()).await.expect("valid");
    assert_eq!(
        host.answer("desk", "s", "agent:slow/find").await,
        "{",
        "after 50 ms, and one letter says that"
    );
    let mut open = host.open_turns().await;
    while open > 0 {
        tokio::task::yield_now().await;
        open = host.open_turns().await;
    }
}

#[tokio::test]
async fn a_call_of_a_client_ends_at_the_timeout_of_the_tool() {
    let host = start().await;
    host.deploy("slow", "[limits]\ncpu_ms = 30000", finder("", "(loop $again (br $again))", 50))
        .await
        .expect("valid");
    let origin = Origin::Tool(ToolOrigin { name: "find".into(), callers: Vec::new(), hops: 0 });
    let durable = Some("k".to_owned());
    for idempotency_key in [None, durable] {
        let (origin, data) = (origin.clone(), Some(json!({"id": 1}).into()));
        let call = Invocation { origin, data, idempotency_key, ..invocation("slow", "s", "") };
        let ended = host.agents.invoke(call).await.expect("taken").outcome().await;
        assert_eq!(ended.expect_err("it does not end by itself").code(), "deadline_exceeded");
    }
}

/// Does the same as `caller`, for a call that times out: the guest replies with one letter per fifty milliseconds of the
/// reported timeout.
pub(super) fn timed_caller() -> Guest {
    let guest = caller();
    let on_message = format!(
        "{} (local.set $text (i32.const 512)) (local.set $length (i32.div_u (i32.load (i32.const 608)) (i32.const 50)))",
        guest.on_message
    );
    Guest { on_message: on_message.leak(), ..guest }
}

/// Counts its calls in the session's state, and then generates, which takes a while.
pub(super) fn counting() -> Guest {
    let imports = r#"
        (import "skep:agent/state@0.1.1" "get" (func $get (param i32 i32 i32)))
        (import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))
        (import "skep:agent/inference@0.1.1" "[static]conversation.open"
            (func $open (param i32 i32 i32 i32 i32 i32)))
        (import "skep:agent/inference@0.1.1" "[method]conversation.append-user"
            (func $append (param i32 i32 i32 i32)))
        (import "skep:agent/inference@0.1.1" "[method]conversation.generate" (func $generate (param i32 i32)))"#;
    let body = r#"
        (call $get (i32.const 3000) (i32.const 1) (i32.const 3100))
        (local.set $b (i32.const 1))
        (if (i32.load8_u (i32.const 3100)) (then (local.set $b (i32.add (i32.const 1) (i32.load (i32.const 3108))))))
        (call $set (i32.const 3000) (i32.const 1) (i32.const 3000) (local.get $b) (i32.const 3140))
        (call $open (i32.const 3000) (i32.const 1) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 3100))
        (local.set $a (i32.load offset=4 (i32.const 3100)))
        (call $append (local.get $a) (local.get $text) (local.get $length) (i32.const 3140))
        (i32.store (i32.const 4096) (local.get $a))
        (i32.store8 offset=80 (i32.const 4096) (i32.const 1))
        (i32.store offset=84 (i32.const 4096) (i32.const 160))
        (call $generate (i32.const 4096) (i32.const 5000))"#;
    let guest = finder(imports, body, 0);
    Guest { module: format!("{} (data (i32.const 3000) \"nnnnnnnn\")", guest.module).leak(), ..guest }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rerun_caller_finds_the_turn_that_it_called() {
    for _ in 0..10 {
        let host = start().await;
        host.deploy("orders", "", counting()).await.expect("valid");
        host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
        let detached = Invocation { detached: true, ..invocation("desk", "s", "agent:orders/find") };
        let handle = host.agents.invoke(detached).await.expect("taken");
        let id = handle.turn_id().to_owned();
        while host.open_turns().await == 1 {
            tokio::task::yield_now().await;
        }
        let host = host.restart_with(granting(&["agent:*/*"])).await;
        let cut_off = matches!(
            host.agents.turn("desk", "s", &id).await.expect("kept").phase,
            TurnPhase::Running { .. }
        );
        let outcome = host
            .agents
            .follow("desk", "s", &id)
            .await
            .expect("kept")
            .outcome()
            .await
            .expect("the turn succeeds");
        assert_eq!(outcome.text, r#"{"id":1}"#);
        let session = host.agents.session("orders", "desk~s").await.expect("there");
        assert_eq!((session.summary.turns, session.state_bytes), (1, 2), "the tool was called once");
        if cut_off {
            return;
        }
    }
    panic!("no call was interrupted");
}

#[tokio::test]
async fn cancelling_a_turn_cancels_the_turns_that_it_called() {
    let host = start().await;
    host.deploy("slow", "[limits]\ncpu_ms = 30000", finder("", "(loop $again (br $again))", 0))
        .await
        .expect("valid");
    host.deploy("desk", &granted("\"agent:slow/find\""), caller()).await.expect("valid");
    let handle = host.invoke("desk", "s", "agent:slow/find").await.expect("taken");
    while host.open_turns().await < 2 {
        tokio::task::yield_now().await;
    }
    drop(handle);
    while host.open_turns().await > 0 {
        tokio::task::yield_now().await;
    }
}

/// A server with the tools `pay`, `look` (which changes nothing) and `fuse` (which cannot be
/// reached). The first call of `pay` and `look` never returns.
#[derive(Debug, Default)]
pub(super) struct Bank {
    pub(super) calls: AtomicU32,
    pub(super) called: Notify,
}

type ToolFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ToolServerError>> + Send + 'a>>;

impl ToolServer for Bank {
    fn tools(&self) -> ToolFuture<'_, Arc<[ServedTool]>> {
        let tool = |name: &str, read_only| ServedTool {
            name: name.into(),
            description: String::new(),
            input_schema: json!({"type": "object"}),
            output_schema: None,
            hints: ToolHints { read_only, ..ToolHints::default() },
        };
        Box::pin(ready(Ok([tool("pay", false), tool("look", true), tool("fuse", true)].into())))
    }

    fn call<'a>(&'a self, tool: &'a str, arguments: Value) -> ToolFuture<'a, Value> {
        Box::pin(async move {
            if tool == "fuse" {
                return Err(ToolServerError::Unavailable("the line is cut".into()));
            }
            if self.calls.fetch_add(1, Ordering::AcqRel) == 0 {
                self.called.notify_one();
                std::future::pending::<()>().await;
            }
            Ok(arguments)
        })
    }
}

pub(super) fn with_bank(bank: &Arc<Bank>) -> Setup {
    let bank: Arc<dyn ToolServer> = bank.clone();
    Setup { tool_servers: [("bank".to_owned(), bank)].into(), ..Setup::from(granting(&["mcp:*/*"])) }
}

#[tokio::test]
async fn an_interrupted_call_is_repeated_only_if_that_is_harmless() {
    for (tool, expected, calls) in
        [("mcp:bank/pay", "check whether the tool did its work", 1), ("mcp:bank/look", r#"{"id":1}"#, 2)]
    {
        let bank = Arc::new(Bank::default());
        let host = Host::with(with_bank(&bank)).await;
        host.deploy("desk", &granted("\"mcp:bank/*\""), caller()).await.expect("valid");
        let detached = Invocation { detached: true, ..invocation("desk", "s", tool) };
        let id = host.agents.invoke(detached).await.expect("taken").turn_id().to_owned();
        bank.called.notified().await;
        let host = host.restart_with(with_bank(&bank)).await;
        let outcome = host
            .agents
            .follow("desk", "s", &id)
            .await
            .expect("kept")
            .outcome()
            .await
            .expect("the turn succeeds");
        assert!(outcome.text.contains(expected), "{tool}: {}", outcome.text);
        assert_eq!(bank.calls.load(Ordering::Acquire), calls, "{tool}");
    }
}

#[tokio::test]
async fn missing_servers_and_missing_tools_are_distinguished() {
    let bank = Arc::new(Bank::default());
    let host = Host::with(with_bank(&bank)).await;
    host.deploy("desk", &granted("\"mcp:bank/*\", \"mcp:safe/*\""), caller()).await.expect("valid");
    for (tool, expected) in [
        ("mcp:safe/open", "does not list an MCP server \"safe\"; it lists: bank"),
        ("mcp:bank/rob", "there is no tool mcp:bank/rob; available tools: pay, look, fuse"),
        ("mcp:bank/fuse", "the line is cut"),
    ] {
        let answer = host.answer("desk", "s", tool).await;
        assert!(answer.contains(expected), "{tool}: {answer}");
    }
}
