//! Tests of turns that outlive their caller and the host.

use super::{
    fixture::{Host, invocation},
    guest::{Guest, counter, echo, spinner},
};
use crate::{Invocation, Json, Outcome, RunEvent, RunHandle, TurnPhase};

const TOKENS: u32 = 160;
/// Enough tokens for several restarts within one generation, nearly as many as the context has room for.
const MANY_TOKENS: u32 = 400;
/// Enough CPU time that the test ends the turn, not the limit.
const PATIENT: &str = "[limits]\ncpu_ms = 30000";

/// The first message of conversations.
pub(super) const QUESTION: &str = "hello, one and all";

/// Counts its turns in the state, then generates [`TOKENS`] tokens in a conversation and replies
/// with them.
pub(super) fn talker() -> Guest {
    Guest {
        module: r#"
            (import "skep:agent/state@0.1.1" "get" (func $get (param i32 i32 i32)))
            (import "skep:agent/state@0.1.1" "set" (func $set (param i32 i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[static]conversation.open"
                (func $open (param i32 i32 i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.append-user"
                (func $append (param i32 i32 i32 i32)))
            (import "skep:agent/inference@0.1.1" "[method]conversation.generate"
                (func $generate (param i32 i32)))
            (data (i32.const 512) "main") (data (i32.const 520) "nxxxxxxxxxxxxxxxx")"#,
        on_message: r#"
            (call $get (i32.const 520) (i32.const 1) (i32.const 600))
            (local.set $b (i32.const 1))
            (if (i32.load8_u (i32.const 600))
                (then (local.set $b (i32.add (i32.const 1) (i32.load (i32.const 608))))))
            (call $set (i32.const 520) (i32.const 1) (i32.const 521) (local.get $b) (i32.const 640))
            (call $open (i32.const 512) (i32.const 4) (i32.const 0) (i32.const 0) (i32.const 0) (i32.const 600))
            (if (i32.load8_u (i32.const 600)) (then unreachable))
            (local.set $a (i32.load offset=4 (i32.const 600)))
            (call $append (local.get $a) (local.get $text) (local.get $length) (i32.const 640))
            (if (i32.load8_u (i32.const 640)) (then unreachable))
            (i32.store (i32.const 1024) (local.get $a))
            (i32.store8 offset=80 (i32.const 1024) (i32.const 1))
            (i32.store offset=84 (i32.const 1024) (i32.const 160))
            (i32.store8 offset=128 (i32.const 1024) (i32.const 1))
            (call $generate (i32.const 1024) (i32.const 2048))
            (if (i32.load8_u (i32.const 2048)) (then unreachable))
            (local.set $text (i32.load offset=8 (i32.const 2048)))
            (local.set $length (i32.load offset=12 (i32.const 2048)))"#,
        ..Guest::default()
    }
}

/// Talks like [`talker`], with up to [`MANY_TOKENS`] tokens.
pub(super) fn long_talker() -> Guest {
    let Guest { on_message, .. } = talker();
    let tokens = |count: u32| format!("(i32.const {count})");
    let on_message = on_message.replace(&tokens(TOKENS), &tokens(MANY_TOKENS));
    Guest { on_message: on_message.leak(), ..talker() }
}

pub(super) fn detached(agent: &str, text: &str) -> Invocation {
    Invocation { detached: true, ..invocation(agent, "s", text) }
}

/// Returns all events of the turn with their numbers.
async fn events(mut handle: RunHandle) -> Vec<(u64, RunEvent)> {
    let mut events = Vec::new();
    while let Some(event) = handle.next().await {
        let event = event.expect("the turn succeeds");
        events.push((handle.last_id().expect("an event has a number"), event));
    }
    events
}

fn outcome(events: &[(u64, RunEvent)]) -> &Outcome {
    match events.last() {
        Some((_, RunEvent::Done(outcome))) => outcome,
        other => panic!("unexpected last event: {other:?}"),
    }
}

fn joined_text(events: &[(u64, RunEvent)]) -> String {
    let deltas = events.iter().filter_map(|(_, event)| match event {
        RunEvent::Delta { text } => Some(text.as_str()),
        _ => None,
    });
    deltas.collect()
}

/// Restarts the host during the turn. Returns the new host and the events that the turn's first
/// caller received before.
async fn cut_off(host: Host, handle: &mut RunHandle) -> (Host, Vec<(u64, RunEvent)>) {
    let mut seen = Vec::new();
    // The tiny model may produce no text at all.
    while !matches!(seen.last(), Some((_, RunEvent::Delta { .. } | RunEvent::Done(_)))) {
        let event = handle.next().await.expect("the turn is still running").expect("the turn succeeds");
        seen.push((handle.last_id().expect("a number"), event));
    }
    (host.restart().await, seen)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_turn_resumes_after_its_last_token() {
    let mut cut_in_the_middle = 0;
    // A generation may end before it can be interrupted.
    for round in 0..40 {
        let host = Host::start().await;
        host.deploy("talk", "", long_talker()).await.expect("valid");
        let mut handle = host.agents.invoke(detached("talk", "hello")).await.expect("taken");
        let id = handle.turn_id().to_owned();
        let (mut host, mut seen) = cut_off(host, &mut handle).await;
        // Two more restarts, if the turn is still running.
        for _ in 0..2 {
            if matches!(
                host.agents.turn("talk", "s", &id).await.expect("kept").phase,
                TurnPhase::Running { .. }
            ) {
                cut_in_the_middle += 1;
                host = host.restart().await;
            }
        }
        let all = events(host.agents.follow("talk", "s", &id).await.expect("kept")).await;
        assert_eq!(all[..seen.len()], seen, "round {round}: received events have not changed");
        seen.extend_from_slice(&all[seen.len()..]);
        assert!(seen.is_sorted_by_key(|(id, _)| *id) && seen.windows(2).all(|pair| pair[0].0 < pair[1].0));
        let outcome = outcome(&seen);
        assert_eq!(outcome.text, joined_text(&seen), "round {round}");
        assert!((1..=MANY_TOKENS).contains(&outcome.usage.completion_tokens), "{outcome:?}");
        let session = host.agents.session("talk", "s").await.expect("committed");
        assert_eq!((session.summary.turns, session.messages.len()), (1, 2));
        assert_eq!(session.messages[1].content, outcome.text);
        assert_eq!(session.state_bytes, 2, "the turn counted itself once");
        if cut_in_the_middle > 2 {
            return;
        }
    }
    panic!("no generation was interrupted");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_diverging_guest_fails_and_changes_nothing() {
    for round in 0..10 {
        let host = Host::start().await;
        host.deploy("talk", "", talker()).await.expect("valid");
        let mut handle = host.agents.invoke(detached("talk", "hello")).await.expect("taken");
        let id = handle.turn_id().to_owned();
        while !matches!(handle.next().await, None | Some(Ok(RunEvent::Delta { .. }))) {}
        // This deploys so many versions that the one with which the turn started is not kept.
        let host = host.restart_with_other_component("talk", counter()).await;
        let handle = host.agents.follow("talk", "s", &id).await.expect("kept");
        match handle.outcome().await {
            // The turn was faster than the restart.
            Ok(_) => continue,
            Err(error) => {
                assert_eq!(error.code(), "divergence", "round {round}: {error}");
                assert!(error.to_string().contains("generate"), "{error}");
            }
        }
        let detail = host.agents.turn("talk", "s", &id).await.expect("kept");
        assert!(matches!(detail.phase, TurnPhase::Failed { code, .. } if code == "divergence"));
        assert_eq!(host.agents.session("talk", "s").await.expect_err("no turn").code(), "session_not_found");
        assert_eq!(host.answer("talk", "s", "go").await, "x");
        return;
    }
    panic!("no generation was interrupted");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_turn_is_finished_by_its_original_version() {
    for _ in 0..10 {
        let host = Host::start().await;
        host.deploy("talk", "", talker()).await.expect("valid");
        let mut handle = host.agents.invoke(detached("talk", "hello")).await.expect("taken");
        let id = handle.turn_id().to_owned();
        while !matches!(handle.next().await, None | Some(Ok(RunEvent::Delta { .. }))) {}
        let host = host.restart_with_versions("talk", echo(), 1).await;
        let ran_on =
            !matches!(host.agents.turn("talk", "s", &id).await.expect("kept").phase, TurnPhase::Done { .. });
        let all = events(host.agents.follow("talk", "s", &id).await.expect("kept")).await;
        assert_eq!(outcome(&all).text, joined_text(&all));
        assert_eq!(host.answer("talk", "s", "echo").await, "echo");
        if ran_on {
            return;
        }
    }
    panic!("no generation was interrupted");
}

#[tokio::test]
async fn a_detached_turn_continues_without_its_caller_and_can_be_followed() {
    let host = Host::start().await;
    host.deploy("talk", "", talker()).await.expect("valid");
    let handle = host.agents.invoke(detached("talk", "hello")).await.expect("taken");
    let id = handle.turn_id().to_owned();
    let other = host.agents.follow("talk", "s", &id).await.expect("the turn exists");
    drop(handle);
    let live = events(other).await;
    let late = events(host.agents.follow("talk", "s", &id).await.expect("kept")).await;
    assert_eq!(live, late, "an ended turn replays the events that were published live");
    let detail = host.agents.turn("talk", "s", &id).await.expect("kept");
    assert!(matches!(detail.phase, TurnPhase::Done { outcome: known, .. } if known == *outcome(&live)));
    for (session, turn) in [("s", "nothing"), ("other", id.as_str())] {
        let error = host.agents.follow("talk", session, turn).await.expect_err("no such turn");
        assert_eq!(error.code(), "turn_not_found");
    }
}

#[tokio::test]
async fn an_idempotency_key_is_one_turn_before_during_and_after_it_runs() {
    let host = Host::start().await;
    host.deploy("talk", "", talker()).await.expect("valid");
    let keyed = Invocation { idempotency_key: Some("k".into()), ..invocation("talk", "s", "hello") };
    let first = host.agents.invoke(keyed.clone()).await.expect("taken");
    let second = host.agents.invoke(keyed.clone()).await.expect("known");
    assert_eq!(first.turn_id(), second.turn_id());
    drop(first);
    let replayed = events(second).await;
    assert_eq!(events(host.agents.invoke(keyed.clone()).await.expect("known")).await, replayed);
    let host = host.restart().await;
    assert_eq!(events(host.agents.invoke(keyed.clone()).await.expect("known")).await, replayed);
    assert_eq!(host.agents.session("talk", "s").await.expect("there").summary.turns, 1);

    let other = Invocation { text: "something else".into(), ..keyed };
    assert_eq!(host.agents.invoke(other).await.expect_err("a different message").code(), "invalid_message");
}

#[tokio::test]
async fn an_idempotency_key_answers_only_its_message_after_its_turn_is_removed() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    let keyed = |text: &str, data: &str| Invocation {
        idempotency_key: Some("k".into()),
        data: Some(Json::from_text(data.to_owned()).expect("JSON")),
        ..invocation("count", "s", text)
    };
    let first = host.agents.invoke(keyed("go", r#"{"n": [1], "o": "é"}"#)).await.expect("taken");
    let turn = first.turn_id().to_owned();
    let outcome = first.outcome().await.expect("the turn succeeds");
    assert_eq!(host.store().forget_turns(1 << 60).await.expect("removed"), 1);
    host.agents.follow("count", "s", &turn).await.expect_err("the turn is removed");
    let by_another_key =
        Invocation { key: Some("second".into()), ..keyed("go", r#"{ "o":"\u00e9","n":[ 1 ] }"#) };
    let again = host.agents.invoke(by_another_key).await.expect("the same message");
    assert_eq!(again.outcome().await.expect("kept"), outcome);
    for (text, data) in [("stop", r#"{"n": [1], "o": "é"}"#), ("go", r#"{"n": [2], "o": "é"}"#)] {
        let error = host.agents.invoke(keyed(text, data)).await.expect_err("a different message");
        assert_eq!(error.code(), "invalid_message");
    }
}

#[tokio::test]
async fn an_idempotency_key_can_be_reused_after_its_turn_failed() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    let keyed =
        |text: &str| Invocation { idempotency_key: Some("k".into()), ..invocation("count", "s", text) };
    let failed = host.agents.invoke(keyed("!")).await.expect("taken").outcome().await;
    assert_eq!(failed.expect_err("the guest traps").code(), "agent_trapped");
    let outcome = host.agents.invoke(keyed("go")).await.expect("taken").outcome().await;
    assert_eq!(outcome.expect("the turn succeeds").text, "x");
}

#[tokio::test]
async fn waiting_turns_run_in_order_after_a_restart() {
    let host = Host::start().await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    host.deploy("count", "", counter()).await.expect("valid");
    let mut spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken");
    spins.next().await.expect("the turn starts").expect("the turn starts");
    let mut waiting = Vec::new();
    for text in ["one", "two", "three"] {
        let handle = host.agents.invoke(detached("spin", text)).await.expect("taken");
        waiting.push((text, handle.turn_id().to_owned()));
    }
    let id = spins.turn_id().to_owned();
    let host = host.restart().await;
    assert!(matches!(
        host.agents.turn("spin", "s", &waiting[0].1).await.expect("kept").phase,
        TurnPhase::Waiting
    ));
    host.agents.cancel_turn("spin", "s", &id).await.expect("the turn runs again");
    let error = host.agents.follow("spin", "s", &id).await.expect("kept").outcome().await;
    assert_eq!(error.expect_err("the turn was cancelled").code(), "cancelled");
    for (number, (text, id)) in (1..).zip(waiting) {
        let all = events(host.agents.follow("spin", "s", &id).await.expect("kept")).await;
        assert_eq!((outcome(&all).text.as_str(), outcome(&all).turn), (text, number));
    }
}

#[tokio::test]
async fn an_open_turn_whose_agent_cannot_be_called_is_cancelled() {
    let host = Host::start().await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let mut spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken");
    spins.next().await.expect("the turn starts").expect("the turn starts");
    let id = spins.turn_id().to_owned();
    let without_compiler =
        crate::RuntimeOptions { compile_timeout: std::time::Duration::ZERO, ..Default::default() };
    let host = host.restart_with(without_compiler).await;
    assert_eq!(host.agents.failed_agents().len(), 1);
    let phase = async || host.agents.turn("spin", "s", &id).await.expect("kept").phase;
    assert!(matches!(phase().await, TurnPhase::Running { .. }), "nobody can run it, and nobody ended it");
    host.agents.cancel_turn("spin", "s", &id).await.expect("known");
    let ended = phase().await;
    assert!(matches!(&ended, TurnPhase::Failed { code, .. } if code == "cancelled"), "{ended:?}");
    // Another host leaves it alone.
    let host = host.restart().await;
    let error = host.agents.follow("spin", "s", &id).await.expect("kept").outcome().await;
    assert_eq!(error.expect_err("it was cancelled").code(), "cancelled");
}

#[tokio::test]
async fn messages_refused_by_a_full_mailbox_are_not_stored() {
    let host = Host::with(crate::RuntimeOptions { mailbox: 1, ..Default::default() }).await;
    host.deploy("spin", PATIENT, spinner()).await.expect("valid");
    let mut spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken");
    spins.next().await.expect("the turn starts").expect("the turn starts");
    host.agents.invoke(detached("spin", "waits")).await.expect("the mailbox has room for one");
    let refused = host.agents.invoke(detached("spin", "too many")).await.expect_err("the mailbox is full");
    assert_eq!(refused.code(), "mailbox_full");
    let open = host.open_turns().await;
    assert_eq!(open, 2);
}
