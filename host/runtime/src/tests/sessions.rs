//! Tests of sessions: one turn at a time, atomic commits, and limits on everything.

use super::{
    fixture::{Host, invocation},
    guest::{Guest, counter, echo, spinner},
};
use crate::{Invocation, LogFilter, RunHandle, RuntimeOptions};
use std::time::Duration;

/// Enough CPU time that the test ends the turn, not the limit.
const PATIENT: &str = "[limits]\ncpu_ms = 30000";

async fn code(handle: RunHandle) -> &'static str {
    handle.outcome().await.expect_err("the turn must fail").code()
}

#[tokio::test]
async fn old_turns_are_removed_from_sessions_that_have_few() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    let run = host.invoke("echo", "s", "hello").await.expect("taken");
    let id = run.turn_id().to_owned();
    run.outcome().await.expect("it ends well");
    let hours = |hours: u64| crate::Clock::default().now_ms() + hours * 3_600_000;
    host.agents.expire_sessions(hours(23)).await.expect("the call succeeds");
    host.agents.turn("echo", "s", &id).await.expect("a turn is kept for a day");
    host.agents.expire_sessions(hours(25)).await.expect("the call succeeds");
    let gone = host.agents.turn("echo", "s", &id).await.expect_err("it is old");
    assert_eq!(gone.code(), "turn_not_found");
    host.agents.session("echo", "s").await.expect("the session is kept");
}

#[tokio::test]
async fn state_is_committed_with_its_turn_and_survives_a_restart() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "a", "go").await, "x");
    assert_eq!(host.answer("count", "a", "go").await, "xx");
    assert_eq!(host.answer("count", "b", "go").await, "x");
    let host = host.restart().await;
    assert!(host.agents.failed_agents().is_empty());
    assert_eq!(host.answer("count", "a", "go").await, "xxx");
    let session = host.agents.session("count", "a").await.expect("the session exists");
    assert_eq!(
        (session.summary.turns, session.state_keys, session.state_bytes),
        (3, vec!["n".to_owned()], 4)
    );
}

#[tokio::test]
async fn a_failed_turn_leaves_only_its_log() {
    let host = Host::start().await;
    let logging = Guest {
        module: r#"(import "skep:agent/log@0.1.1" "write" (func $log (param i32 i32 i32)))
            (data (i32.const 512) "oh no")"#,
        on_message: "(call $log (i32.const 3) (i32.const 512) (i32.const 5)) unreachable",
        ..Guest::default()
    };
    host.deploy("broken", "", logging).await.expect("valid");
    let error = host.ask("broken", "s", "go").await.expect_err("the guest traps").to_string();
    assert!(error.contains("it last logged: oh no"), "{error}");
    let logs = host.agents.logs(&LogFilter::of_agent("broken"), None, 10).await.expect("the agent exists");
    assert_eq!((logs[0].level.as_str(), logs[0].message.as_str(), logs[0].turn), ("error", "oh no", 1));
    assert_eq!((logs.len(), logs[1].level.as_str(), &logs[1].message), (2, "error", &error));
    assert_eq!(host.agents.session("broken", "s").await.expect_err("no turn").code(), "session_not_found");

    host.deploy("count", "", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    host.ask("count", "s", "!").await.expect_err("the guest writes and traps");
    assert_eq!(host.answer("count", "s", "go").await, "xx");
}

#[tokio::test]
async fn a_repeated_idempotency_key_runs_the_turn_once() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    let mut keyed = invocation("count", "s", "go");
    keyed.idempotency_key = Some("k".into());
    for _ in 0..2 {
        let outcome = host
            .agents
            .invoke(keyed.clone())
            .await
            .expect("taken")
            .outcome()
            .await
            .expect("the turn succeeds");
        assert_eq!((outcome.text.as_str(), outcome.turn), ("x", 1));
    }
    assert_eq!(host.answer("count", "s", "go").await, "xx");
    for key in ["", "\u{1}event 1", "\u{1}alarm s 7", "a\nb", "a\u{85}b"] {
        let keyed = Invocation { idempotency_key: Some(key.to_owned()), ..keyed.clone() };
        assert_eq!(
            host.agents.invoke(keyed).await.expect_err("no client may use this key").code(),
            "invalid_message"
        );
    }
}

#[tokio::test]
async fn a_full_mailbox_refuses_messages_and_others_are_served() {
    let host = Host::with(RuntimeOptions { mailbox: 2, ..RuntimeOptions::default() }).await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let mut taken = Vec::new();
    let refused = loop {
        match host.invoke("spin", "s", "spin").await {
            Ok(handle) => taken.push(handle),
            Err(error) => break error,
        }
    };
    assert_eq!(refused.code(), "mailbox_full");
    assert!((2..=3).contains(&taken.len()), "one runs and two wait: {}", taken.len());
    assert_eq!(host.answer("spin", "other", "hello").await, "hello");
    drop(taken);
    assert_eq!(host.answer("spin", "s", "hello").await, "hello");
}

#[tokio::test]
async fn dropping_the_handle_cancels_the_turn_and_the_next_one_runs() {
    let host = Host::start().await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let mut handle = host.invoke("spin", "s", "spin").await.expect("taken");
    handle.next().await.expect("the turn starts").expect("the turn starts");
    drop(handle);
    let outcome = host.ask("spin", "s", "hello").await.expect("the turn succeeds");
    assert_eq!(outcome.turn, 1);
}

#[tokio::test]
async fn sessions_over_the_limit_are_unloaded_and_keep_their_state() {
    let host = Host::with(RuntimeOptions { max_sessions_loaded: 2, ..RuntimeOptions::default() }).await;
    host.deploy("count", "", counter()).await.expect("valid");
    for expected in ["x", "xx"] {
        for session in ["a", "b", "c", "d"] {
            assert_eq!(host.answer("count", session, "go").await, expected);
            assert!(host.agents.loaded_sessions() <= 2);
        }
    }
}

#[tokio::test]
async fn thousands_of_idle_sessions_stay_within_the_memory_limit() {
    // The state of a session has 2 or 3 bytes here, so about a hundred sessions fit.
    let options = RuntimeOptions { max_session_bytes: 256, ..RuntimeOptions::default() };
    let host = Host::with(options).await;
    host.deploy("count", "", counter()).await.expect("valid");
    for (expected, step) in [("x", 1), ("xx", 10)] {
        for session in (0..2_000).step_by(step) {
            assert_eq!(host.answer("count", &format!("s{session}"), "go").await, expected);
            assert!(host.agents.loaded_sessions() <= 256, "{} are loaded", host.agents.loaded_sessions());
        }
    }
}

#[tokio::test]
async fn a_new_session_is_refused_when_all_loaded_ones_are_busy() {
    let host = Host::with(RuntimeOptions { max_sessions_loaded: 1, ..RuntimeOptions::default() }).await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let busy = host.invoke("spin", "a", "spin").await.expect("taken");
    assert_eq!(host.invoke("spin", "b", "hello").await.expect_err("no room").code(), "mailbox_full");
    drop(busy);
}

#[tokio::test]
async fn an_idle_session_is_unloaded() {
    let options = RuntimeOptions { session_idle: Duration::ZERO, ..RuntimeOptions::default() };
    let host = Host::with(options).await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    while host.agents.loaded_sessions() > 0 {
        tokio::task::yield_now().await;
    }
    assert_eq!(host.answer("count", "s", "go").await, "xx");
}

#[tokio::test]
async fn a_deleted_session_starts_over_and_a_deleted_agent_is_not_found() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    host.answer("count", "s", "go").await;
    host.agents.delete_session("count", "s").await.expect("the session exists");
    assert_eq!(
        host.agents.delete_session("count", "s").await.expect_err("the session is gone").code(),
        "session_not_found"
    );
    assert_eq!(host.answer("count", "s", "go").await, "x");

    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let mut running = host.invoke("spin", "s", "spin").await.expect("taken");
    running.next().await.expect("the turn starts").expect("the turn starts");
    host.agents.delete("spin").await.expect("the agent exists");
    assert_eq!(code(running).await, "cancelled");
    assert_eq!(host.ask("spin", "s", "hello").await.expect_err("gone").code(), "agent_not_found");
    assert_eq!(host.agents.delete("spin").await.expect_err("gone").code(), "agent_not_found");
}

#[tokio::test]
async fn a_drain_waits_for_turns_until_its_deadline_and_refuses_new_ones() {
    let host = Host::start().await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let ends = host.invoke("spin", "a", "hello").await.expect("taken");
    let runs_on = host.invoke("spin", "b", "spin").await.expect("taken");
    host.agents.drain(Duration::from_secs(4)).await;
    assert_eq!(ends.outcome().await.expect("the turn ends in time").text, "hello");
    assert_eq!(code(runs_on).await, "cancelled");
    assert_eq!(host.invoke("spin", "a", "hello").await.expect_err("closed").code(), "shutting_down");
    assert_eq!(host.deploy("late", "", echo()).await.expect_err("closed").code(), "shutting_down");
}

#[tokio::test]
async fn invalid_names_are_refused_before_anything_runs() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    for (agent, session, code) in [
        ("Echo", "s", "invalid_name"),
        ("echo", "A/b", "invalid_name"),
        ("echo", "other/s", "session_not_found"),
        ("nobody", "s", "agent_not_found"),
    ] {
        assert_eq!(host.invoke(agent, session, "hi").await.expect_err(agent).code(), code);
    }
}
