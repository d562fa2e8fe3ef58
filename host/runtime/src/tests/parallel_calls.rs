//! Tests of turns that make several calls at the same time: their clock stops only while all of them wait for people.

use super::{
    approvals::{ASKS, attached, decide, pending},
    fixture::{Host, Setup, invocation, until},
    guest::Guest,
    tools::{echoing, granted, granting, relay},
};
use crate::{Invocation, RunHandle, ServedTool, ToolHints, ToolServer, ToolServerError};
use serde_json::{Value, json};
use std::{future::ready, pin::Pin, sync::Arc};
use tokio::sync::Notify;

const BROKER: &str = "agent:broker/find";
pub(super) const GATE: &str = "mcp:gate/pass";

/// A server whose tool `pass` returns once the test lets it.
#[derive(Debug, Default)]
pub(super) struct Gate {
    pub(super) reached: Notify,
    pub(super) opened: Notify,
}

type ToolFuture<'a, T> = Pin<Box<dyn Future<Output = Result<T, ToolServerError>> + Send + 'a>>;

impl ToolServer for Gate {
    fn tools(&self) -> ToolFuture<'_, Arc<[ServedTool]>> {
        let pass = ServedTool {
            name: "pass".into(),
            description: String::new(),
            input_schema: json!({"type": "object"}),
            output_schema: None,
            hints: ToolHints::default(),
        };
        Box::pin(ready(Ok([pass].into())))
    }

    fn call<'a>(&'a self, _tool: &'a str, arguments: Value) -> ToolFuture<'a, Value> {
        Box::pin(async move {
            self.reached.notify_one();
            self.opened.notified().await;
            Ok(arguments)
        })
    }
}

/// Calls up to three tools at the same time with `{"id":1}`, and replies with the result or the error's text of the last one.
pub(super) fn calling(tools: &[&str]) -> Guest {
    let (mut names, mut calls) = (String::new(), String::new());
    for (index, tool) in tools.iter().enumerate() {
        let (name, call) = (3_000 + index * 100, 640 + index * 128);
        names += &format!("(data (i32.const {name}) \"{tool}\")");
        calls += &format!("(call $begin (i32.const {name}) (i32.const {}) (i32.const {call}))\n", tool.len());
    }
    let module = format!(
        r#"
            (import "skep:agent/tools@0.1.1" "[async-lower]call" (func $call (param i32 i32) (result i32)))
            (import "$root" "[waitable-set-new]" (func $set (result i32)))
            (import "$root" "[waitable-join]" (func $join (param i32 i32)))
            (import "$root" "[waitable-set-wait]" (func $wait (param i32 i32) (result i32)))
            (data (i32.const 512) "{{\"id\":1}}") {names}
            (global $all (mut i32) (i32.const 0))
            (global $open (mut i32) (i32.const 0))
            ;; The arguments of a call are at $call, and its result is 64 bytes behind them.
            (func $begin (param $name i32) (param $length i32) (param $call i32)
                (local $status i32)
                (i32.store (local.get $call) (local.get $name))
                (i32.store offset=4 (local.get $call) (local.get $length))
                (i32.store offset=8 (local.get $call) (i32.const 512))
                (i32.store offset=12 (local.get $call) (i32.const 8))
                (i32.store8 offset=16 (local.get $call) (i32.const 0))
                (local.set $status (call $call (local.get $call) (i32.add (local.get $call) (i32.const 64))))
                ;; State 2 says that the call has returned.
                (if (i32.ne (i32.and (local.get $status) (i32.const 15)) (i32.const 2)) (then
                    (global.set $open (i32.add (global.get $open) (i32.const 1)))
                    (call $join (i32.shr_u (local.get $status) (i32.const 4)) (global.get $all)))))"#
    );
    let result = 640 + (tools.len() - 1) * 128 + 64;
    let on_message = format!(
        r#"
            (global.set $all (call $set))
            {calls}
            (loop $again (if (global.get $open) (then
                (drop (call $wait (global.get $all) (i32.const 1100)))
                (if (i32.eq (i32.load (i32.const 1104)) (i32.const 2)) (then
                    (global.set $open (i32.sub (global.get $open) (i32.const 1)))))
                (br $again))))
            (local.set $a (i32.add (i32.const {}) (i32.mul (i32.const 4) (i32.load8_u (i32.const {result})))))
            (local.set $text (i32.load (local.get $a)))
            (local.set $length (i32.load offset=4 (local.get $a)))"#,
        result + 4
    );
    Guest { module: module.leak(), on_message: on_message.leak(), ..Guest::default() }
}

/// Starts a host with the agent `desk`, which calls these tools and has six seconds for a turn. `broker` calls `orders`, which a
/// person has to approve.
async fn start(gate: &Arc<Gate>, broker: &str, tools: &[&str]) -> Host {
    let mut setup = Setup::from(granting(&["agent:*/*", "mcp:*/*"]));
    setup.tool_servers.insert("gate".to_owned(), gate.clone());
    let host = Host::with(setup).await;
    host.deploy("orders", ASKS, echoing()).await.expect("valid");
    let broker = format!("{}\n{broker}", granted("\"agent:orders/find\""));
    host.deploy("broker", &broker, relay("orders")).await.expect("valid");
    let desk = format!("{}\n[limits]\nturn_ms = 6000", granted(&format!("\"{BROKER}\", \"{GATE}\"")));
    host.deploy("desk", &desk, calling(tools)).await.expect("valid");
    host
}

async fn begin(host: &Host) -> RunHandle {
    let detached = Invocation { detached: true, ..invocation("desk", "s", "") };
    host.agents.invoke(detached).await.expect("taken")
}

#[tokio::test]
async fn waiting_behind_a_suspended_turn_does_not_count_as_turn_time() {
    let host = start(&Arc::default(), "[limits]\napproval_ms = 6500", &[BROKER, BROKER]).await;
    let handle = begin(&host).await;
    let turn = handle.turn_id().to_owned();
    let first = until(async || pending(&host).await.pop()).await;
    let called = host.agents.follow("broker", &first.session, &first.turn_id).await.expect("it waits");
    let refused = called.outcome().await.expect_err("nobody has decided in time");
    assert!(refused.to_string().contains("nobody approved this call in time"), "{refused}");
    let second = tokio::select! {
        second = until(async || pending(&host).await.pop()) => second,
        ended = handle.outcome() => panic!("the second call has not been decided: {ended:?}"),
    };
    assert_ne!(second.turn_id, first.turn_id);
    decide(&host, &second.id, true).await.expect("the approval is still open");
    let outcome = host.agents.follow("desk", "s", &turn).await.expect("kept").outcome().await;
    // The result is that of the call that the guest began last. Which of the two reaches `broker` first is not defined.
    let text = outcome.expect("its time was not used up").text;
    assert!(text == r#"{"id":1}"# || text.contains("nobody approved this call in time"), "{text}");
    let orders = host.agents.session("orders", "broker~desk~s").await.expect("called");
    assert_eq!(orders.summary.turns, 1, "only the second call was approved");
}

#[tokio::test]
async fn a_turn_is_suspended_once_only_calls_that_wait_for_people_are_left() {
    let gate = Arc::<Gate>::default();
    let host = start(&gate, "", &[GATE, BROKER, BROKER]).await;
    let handle = begin(&host).await;
    gate.reached.notified().await;
    gate.opened.notify_one();
    for _ in 0..2 {
        let asked = until(async || pending(&host).await.pop()).await;
        let error = attached(&host, "s").await.expect_err("nobody has decided");
        assert_eq!(error.code(), "waiting_for_approval");
        assert!(error.to_string().contains(&format!("approval {}:", asked.id)), "{error}");
        decide(&host, &asked.id, true).await.expect("the approval is still open");
    }
    assert_eq!(handle.outcome().await.expect("the turn succeeds").text, r#"{"id":1}"#);
    assert_eq!(host.agents.session("broker", "desk~s").await.expect("called").summary.turns, 2, "each once");
}

#[tokio::test]
async fn the_clock_of_a_turn_runs_while_one_of_its_calls_does() {
    let gate = Arc::<Gate>::default();
    let host = start(&gate, "", &[GATE, BROKER]).await;
    let handle = begin(&host).await;
    until(async || pending(&host).await.pop()).await;
    gate.reached.notified().await;
    let error = handle.outcome().await.expect_err("nobody opens the gate");
    assert_eq!(error.code(), "deadline_exceeded");
    until(async || pending(&host).await.is_empty().then_some(())).await;
}
