//! Tests of hostile guests. Each fails with a typed error, and the host keeps working.

use super::{
    fixture::Host,
    guest::{Guest, spinner},
};
use crate::{RuntimeError, RuntimeOptions};
use std::time::{Duration, Instant};

const TIGHT: &str = "[limits]\nmemory_mb = 4\ncpu_ms = 50";

/// Returns the error of one turn, after checking that the host still serves others.
async fn verdict(limits: &str, guest: Guest) -> RuntimeError {
    let host = Host::start().await;
    host.deploy("hostile", limits, guest).await.expect("the guest can be deployed");
    let error = host.ask("hostile", "s", "go").await.expect_err("the turn must fail");
    host.deploy("good", "", spinner()).await.expect("the host keeps working");
    assert_eq!(host.answer("good", "s", "hello").await, "hello");
    error
}

fn limit(error: &RuntimeError) -> &'static str {
    match error {
        RuntimeError::LimitExceeded { limit, .. } => limit,
        other => panic!("no limit was exceeded: {other}"),
    }
}

#[tokio::test]
async fn endless_loops_in_start_and_describe_are_rejected_at_deployment() {
    let host = Host::start().await;
    let start = Guest { module: "(start $spin) (func $spin (loop $again (br $again)))", ..Guest::default() };
    let describe = Guest { describe: "(loop $again (br $again))", ..Guest::default() };
    for guest in [start, describe] {
        let message =
            host.deploy("hostile", TIGHT, guest).await.expect_err("the guest never returns").to_string();
        assert!(message.contains("cpu_ms"), "{message}");
    }
}

#[tokio::test]
async fn too_much_initial_memory_is_rejected_at_deployment() {
    let host = Host::start().await;
    let message =
        host.deploy("big", TIGHT, Guest { pages: 100, ..Guest::default() }).await.expect_err("6.25 MiB");
    assert!(message.to_string().contains("memory_mb"), "{message}");
}

#[tokio::test]
async fn recursion_is_limited_by_the_operators_stack_size() {
    let guest = || Guest {
        module: "(func $sink (param i32) (if (local.get 0)
            (then (call $sink (i32.sub (local.get 0) (i32.const 1))))))",
        on_message: "(call $sink (i32.const 8000))",
        ..Guest::default()
    };
    let host = Host::with(RuntimeOptions { stack_kb: 64, ..RuntimeOptions::default() }).await;
    host.deploy("deep", "", guest()).await.expect("valid");
    let error = host.ask("deep", "s", "go").await.expect_err("too deep");
    assert_eq!(limit(&error), "stack_kb");
    assert!(error.to_string().contains("`stack_kb` under [runtime] in skep.toml"), "{error}");
    let host = host.restart_with(RuntimeOptions { stack_kb: 4_096, ..RuntimeOptions::default() }).await;
    assert_eq!(host.answer("deep", "s", "go").await, "go");
    let endless = "(drop (call $recurse (i32.const 0)))";
    host.deploy("deep", "", Guest { on_message: endless, ..Guest::default() }).await.expect("valid");
    assert_eq!(limit(&host.ask("deep", "s", "go").await.expect_err("the stack is limited")), "stack_kb");
}

#[tokio::test]
async fn unreachable_code_and_invalid_pointers_are_traps() {
    let nowhere = "(local.set $length (i32.const -1))";
    for instructions in ["unreachable", nowhere] {
        let error = verdict("", Guest { on_message: instructions, ..Guest::default() }).await;
        assert_eq!(error.code(), "agent_trapped", "{error}");
    }
}

#[tokio::test]
async fn a_trap_names_the_functions_on_the_stack() {
    let guest = Guest {
        module: "(func $open_the_door (call $turn_the_key)) (func $turn_the_key unreachable)",
        on_message: "(call $open_the_door)",
        ..Guest::default()
    };
    let trap = verdict("", guest).await.to_string();
    assert!(trap.contains("; it was in turn_the_key, from open_the_door"), "{trap}");
    let deep = verdict(
        "",
        Guest {
            module: "(func $sink (param i32)
                (if (i32.eqz (local.get 0)) (then unreachable))
                (call $sink (i32.sub (local.get 0) (i32.const 1))))",
            on_message: "(call $sink (i32.const 500))",
            ..Guest::default()
        },
    )
    .await
    .to_string();
    assert_eq!(deep.matches("sink").count(), 12, "{deep}");
}

#[tokio::test]
async fn arguments_and_replies_are_bounded() {
    let log = Guest {
        module: r#"(import "skep:agent/log@0.1.1" "write" (func $log (param i32 i32 i32)))"#,
        on_message: "(call $log (i32.const 1) (i32.const 0) (i32.const 50000000))",
        pages: 800,
        ..Guest::default()
    };
    assert_eq!(limit(&verdict("", log).await), "call_bytes");
    let reply = Guest {
        on_message: "(local.set $text (i32.const 100000)) (local.set $length (i32.const 20000000))",
        pages: 800,
        ..Guest::default()
    };
    assert_eq!(limit(&verdict("", reply).await), "reply_bytes");
}

#[tokio::test]
async fn handles_that_are_never_dropped_are_bounded() {
    let leak = Guest {
        module: r#"
            (import "skep:agent/inference@0.1.1" "[static]conversation.open"
                (func $open (param i32 i32 i32 i32 i32 i32)))
            (data (i32.const 512) "main")"#,
        on_message: r#"(loop $again
            (call $open (i32.const 512) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 600))
            (br $again))"#,
        ..Guest::default()
    };
    assert_eq!(limit(&verdict("", leak).await), "resources");
}

#[tokio::test]
async fn a_turn_ends_at_the_agents_and_at_the_callers_deadline() {
    let host = Host::start().await;
    host.deploy("own", "[limits]\ncpu_ms = 30000\nturn_ms = 50", spinner()).await.expect("valid");
    assert_eq!(host.ask("own", "s", "spin").await.expect_err("50 ms").code(), "deadline_exceeded");
    host.deploy("callers", "[limits]\ncpu_ms = 30000", spinner()).await.expect("valid");
    let mut invocation = super::fixture::invocation("callers", "s", "spin");
    invocation.deadline = Some(Instant::now() + Duration::from_millis(50));
    let handle = host.agents.invoke(invocation).await.expect("taken");
    assert_eq!(handle.outcome().await.expect_err("50 ms").code(), "deadline_exceeded");
}
