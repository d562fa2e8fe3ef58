//! Tests that every open turn in the store is run by exactly one owner.

use super::{
    durability::detached,
    fixture::{Host, invocation, until},
    guest::{Guest, counter, echo, spinner},
    tools::{caller, echoing, finder, granted, granting},
    waker::waker,
};
use crate::{Event, Invocation, LogFilter, Origin, RuntimeOptions, ToolOrigin, TurnPhase, session::Input};
use serde_json::json;
use skep_store::{Acceptance, Decision, NewApproval, NewTurn, TurnKey, Verdict};
use std::{future::Future, pin::pin, task::Context, time::Duration};

/// Stores a message whose owner is lost before its session has received it.
async fn stored(host: &Host, id: &str, message: &Invocation, input: Vec<u8>) -> TurnKey {
    let row = NewTurn {
        id: id.into(),
        agent: message.agent.clone(),
        session: message.session.clone(),
        idempotency_key: message.idempotency_key.clone(),
        digest: String::new(),
        input,
        seed: vec![7; 32],
        accepted_at_ms: 1,
        number: None,
    };
    match host.store().accept_turn(row).await.expect("stored") {
        Acceptance::New(key) => key,
        Acceptance::Known(key) => panic!("{key:?} is known"),
    }
}

async fn phase(host: &Host, agent: &str, turn: &str) -> TurnPhase {
    host.agents.turn(agent, "s", turn).await.expect("kept").phase
}

#[tokio::test]
async fn a_message_is_accepted_although_its_caller_disconnects() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    {
        let mut accepting = pin!(host.agents.invoke(detached("count", "go")));
        let waker = std::task::Waker::noop();
        assert!(accepting.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
    }
    until(async || host.agents.session("count", "s").await.ok()).await;
    assert_eq!(host.open_turns().await, 0);
}

#[tokio::test]
async fn a_turn_without_an_owner_is_adopted() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    let keyed = Invocation { idempotency_key: Some("k".into()), ..invocation("echo", "s", "once") };
    stored(&host, "asked-for", &keyed, Input::encode(&keyed)).await;
    let found = host.agents.invoke(keyed).await.expect("the turn is found");
    assert_eq!(found.turn_id(), "asked-for");
    assert_eq!(found.outcome().await.expect("the turn runs").text, "once");

    let alone = detached("echo", "alone");
    stored(&host, "alone", &alone, Input::encode(&alone)).await;
    let outcome = until(async || match phase(&host, "echo", "alone").await {
        TurnPhase::Done { outcome, .. } => Some(outcome),
        _ => None,
    });
    assert_eq!(outcome.await.text, "alone");
}

#[tokio::test]
async fn an_unreadable_message_fails_only_its_turn() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    let message = detached("echo", "hi");
    stored(&host, "unreadable", &message, b"{\"text\":".to_vec()).await;
    stored(&host, "readable", &message, Input::encode(&message)).await;
    let host = host.restart().await;
    let readable = host.agents.follow("echo", "s", "readable").await.expect("kept").outcome().await;
    assert_eq!(readable.expect("the turn runs").text, "hi");
    let TurnPhase::Failed { message, .. } = phase(&host, "echo", "unreadable").await else {
        panic!("the unreadable turn must fail")
    };
    assert!(message.contains("unreadable"), "{message}");
}

#[tokio::test]
async fn a_turn_lost_with_three_processes_fails_but_orderly_stops_do_not_count() {
    let patient = "[limits]\ncpu_ms = 30000";
    let mut host = Host::start().await;
    host.deploy("spin", patient, spinner()).await.expect("valid");
    let manifest = "[[trigger.event]]\ntopic = \"skep.turn.failed\"\nsession = \"watch\"";
    host.deploy("watcher", manifest, waker()).await.expect("valid");
    let spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken").turn_id().to_owned();
    let running = async |host: &Host| {
        until(async || {
            let live = host.agents.follow("spin", "s", &spins).await.expect("kept").next().await;
            live.is_some().then_some(())
        })
        .await;
        assert!(matches!(phase(host, "spin", &spins).await, TurnPhase::Running { .. }));
    };
    running(&host).await;
    for _ in 0..4 {
        host = host.restart().await;
        running(&host).await;
    }
    for losses in 1..=3 {
        host = host.crash().await.start(RuntimeOptions::default()).await;
        if losses < 3 {
            running(&host).await;
        }
    }
    let TurnPhase::Failed { code, message, .. } = phase(&host, "spin", &spins).await else {
        panic!("the turn must fail permanently")
    };
    assert_eq!(code, "turn_lost");
    assert!(message.contains("failed 3 times"), "{message}");
    let [failed] = &host.agents.events(None, 10).await.expect("listed")[..] else {
        panic!("the failure must be published once")
    };
    let data = failed.data.as_ref().expect("the event has data").value();
    assert_eq!((&failed.id, &data["error"]["code"]), (&spins, &json!("turn_lost")));
    until(async || (host.answer("watcher", "watch", "E").await.len() == 1).then_some(())).await;
    assert_eq!(host.answer("spin", "s", "hello").await, "hello", "the session keeps working");
}

#[tokio::test]
async fn turns_that_wait_for_turns_never_take_the_last_instance_slots() {
    let one = RuntimeOptions { max_instances: 1, ..granting(&["agent:*/*"]) };
    let host = Host::with(one).await;
    host.deploy("orders", "", echoing()).await.expect("valid");
    host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    let ask = async |session| host.answer("desk", session, "agent:orders/find").await;
    let answers = async { tokio::join!(ask("a"), ask("b"), ask("c")) };
    let answers =
        tokio::time::timeout(Duration::from_secs(20), answers).await.expect("no turn waits forever");
    let answer = || r#"{"id":1}"#.to_owned();
    assert_eq!(answers, (answer(), answer(), answer()));
}

#[tokio::test]
async fn a_failed_call_by_an_agent_keeps_its_key_and_one_by_a_client_does_not() {
    let host = Host::with(granting(&["agent:*/*"])).await;
    // A trap leaves a line in the log.
    host.deploy("orders", "", finder("", "unreachable", 0)).await.expect("valid");
    for (callers, runs) in [(vec!["desk".to_owned()], 1), (Vec::new(), 3)] {
        let call = Invocation {
            data: Some(json!({"id": 1}).into()),
            origin: Origin::Tool(ToolOrigin { name: "find".into(), callers, hops: 0 }),
            idempotency_key: Some(format!("call {runs}")),
            ..detached("orders", "")
        };
        for _ in 0..2 {
            let outcome = host.agents.invoke(call.clone()).await.expect("taken").outcome().await;
            assert!(outcome.expect_err("the guest traps").to_string().contains("trapped"));
        }
        let lines = host.agents.logs(&LogFilter::default(), None, 100).await.expect("readable");
        assert_eq!(lines.iter().filter(|line| line.message.contains("trapped")).count(), runs);
    }
}

#[tokio::test]
async fn a_session_recovers_after_its_actor_panicked() {
    let host = Host::start().await;
    host.deploy("echo", "", echo()).await.expect("valid");
    assert_eq!(host.answer("echo", "s", "before").await, "before");
    host.agents.panic_in("echo", "s");
    until(async || (host.agents.loaded_sessions() == 0).then_some(())).await;
    assert_eq!(host.answer("echo", "s", "after").await, "after");
}

#[tokio::test]
async fn an_approval_of_other_arguments_does_not_apply() {
    let host = Host::with(granting(&["agent:*/*"])).await;
    host.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    let message = detached("desk", "agent:orders/find");
    // Simulates a guest that asked about something else before a crash.
    host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    let turn = stored(&host, "t1", &message, Input::encode(&message)).await;
    let asked = NewApproval {
        id: "t1-1".into(),
        turn,
        tool: "agent:orders/find".into(),
        arguments: r#"{"id":2}"#.into(),
        created_at_ms: 1,
        expires_at_ms: u64::MAX >> 1,
    };
    host.store().ask_approval(&asked).await.expect("asked");
    let approved =
        Decision { verdict: Verdict::Approved, reason: None, decided_by: "ann".into(), decided_at_ms: 2 };
    assert!(host.store().decide_approval("t1-1", &approved).await.expect("decided"));
    let outcome = host.agents.follow("desk", "s", "t1").await.expect("kept").outcome().await;
    let error = outcome.expect_err("nobody saw these arguments");
    assert_eq!(error.code(), "divergence", "{error}");
    host.agents.session("orders", "desk~s").await.expect_err("nothing was called");
}

/// Returns a guest that handles events and asks a person about a call for each.
fn asking() -> Guest {
    let guest = caller();
    let module = format!(
        r#"{} (data (i32.const 3000) "agent:orders/find")
        (func (export "skep:agent/event-handler@0.1.1#on-event")
            (param i32 i32 i32 i32 i32 i32 i32 i32 i32 i64 i64 i64 i32) (result i32)
            (call $call (i32.const 3000) (i32.const 17) (i32.const 512) (i32.const 8) (i32.const 0) (i32.const 0)
                (i32.const 600))
            (i32.store8 (i32.const 200) (i32.const 0))
            (i32.const 200))"#,
        guest.module
    );
    Guest { world: "export skep:agent/event-handler@0.1.1;", module: module.leak(), ..guest }
}

#[tokio::test]
async fn turns_that_wait_for_people_do_not_block_events() {
    let host = Host::with(granting(&["agent:*/*"])).await;
    host.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    let trigger = |topic: &str| format!("[[trigger.event]]\ntopic = \"{topic}\"\nsession = \"{{data.to}}\"");
    let asks = format!("{}\n{}", granted("\"agent:orders/find\""), trigger("ask.*"));
    host.deploy("asks", &asks, asking()).await.expect("valid");
    host.deploy("w", &trigger("order.*"), waker()).await.expect("valid");
    let event = |topic: &str, to: String| Event {
        id: None,
        source: "shop".into(),
        topic: topic.into(),
        data: Some(json!({ "to": to }).into()),
        at_ms: None,
        principal: "local".into(),
    };
    for number in 0..80 {
        host.agents.publish(event("ask.x", format!("s{number}"))).await.expect("taken");
    }
    let asked = async || host.agents.approvals(None, 100).await.expect("listed").len();
    until(async || (asked().await == 80).then_some(())).await;
    host.agents.publish(event("order.x", "s".into())).await.expect("taken");
    until(async || (host.answer("w", "s", "E").await.len() == 1).then_some(())).await;
}
