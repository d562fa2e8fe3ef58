//! Turns run on the host that owns their session, wherever they are sent, followed or cancelled.

use super::{Cluster, events, number, owner};
use crate::{
    Event, Invocation, RunEvent, RuntimeOptions, SessionPlace, TurnPhase,
    tests::{
        doer::keyed,
        durability::detached,
        fixture::{invocation, until},
        guest::{counter, echo, spinner},
        tools::{caller, echoing, finder, granted, granting, timed_caller},
        waker::waker,
    },
};
use serde_json::json;
use std::{sync::atomic::Ordering, time::Duration};

const PATIENT: &str = "[limits]\ncpu_ms = 60000";

#[tokio::test(flavor = "multi_thread")]
async fn a_message_runs_on_the_host_that_owns_its_session() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("count", "", counter()).await.expect("valid");
    until(async || other.agents.agent("count").ok()).await;
    assert_eq!(owner(&one, "count", "s").await, None);
    assert_eq!(one.answer("count", "s", "go").await, "x");
    for (host, reply) in [(&other, "xx"), (&one, "xxx"), (&other, "xxxx")] {
        assert_eq!(host.answer("count", "s", "go").await, reply);
    }
    assert_eq!(owner(&other, "count", "s").await, Some(number(&one)));
    assert_eq!(other.agents.loaded_sessions(), 0, "it sent all messages to the owner");
    assert_eq!(one.agents.place_of("count", "s").await.expect("known"), SessionPlace::Here);
    let SessionPlace::There(member) = other.agents.place_of("count", "s").await.expect("known") else {
        panic!("another host owns it")
    };
    assert_eq!(member.number, number(&one));
    assert_eq!(other.agents.place_of("count", "new").await.expect("known"), SessionPlace::Here);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_durable_turn_has_the_same_events_on_every_host() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("echo", "", echo()).await.expect("valid");
    until(async || other.agents.agent("echo").ok()).await;
    one.answer("echo", "s", "before").await;
    let run = other.agents.invoke(detached("echo", "hello")).await.expect("taken");
    let id = run.turn_id().to_owned();
    let there = events(run).await;
    for host in [&one, &other] {
        assert_eq!(events(host.agents.follow("echo", "s", &id).await.expect("kept")).await, there);
    }
    assert!(matches!(&there[..], [(0, RunEvent::Started { turn: 2 }), (_, RunEvent::Done(_))]), "{there:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_calls_an_agent_whose_session_another_host_owns() {
    let Some((_cluster, one, other)) = Cluster::of_two(granting(&["agent:*/*"])).await else { return };
    one.deploy("orders", "", echoing()).await.expect("valid");
    one.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    until(async || other.agents.agent("desk").ok()).await;
    other.ask("orders", "desk~s", "agent:none/find").await.expect("the error is its reply");
    assert_eq!(one.answer("desk", "s", "agent:orders/find").await, r#"{"id":1}"#);
    assert_eq!(owner(&one, "orders", "desk~s").await, Some(number(&other)));
    assert_eq!(owner(&one, "desk", "s").await, Some(number(&one)));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_and_an_alarm_reach_a_session_of_another_host_once() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    let manifest = "[[trigger.event]]\ntopic = \"order.*\"\nsession = \"s\"";
    one.deploy("wake", manifest, waker()).await.expect("valid");
    until(async || other.agents.agent("wake").ok()).await;
    assert_eq!(one.answer("wake", "s", "a").await, "");
    let event = Event {
        id: Some("1".into()),
        source: "shop".into(),
        topic: "order.paid".into(),
        data: Some(json!({}).into()),
        at_ms: None,
        principal: "local".into(),
    };
    other.agents.publish(event).await.expect("taken");
    until(async || (other.answer("wake", "s", "E").await.len() == 1).then_some(())).await;
    until(async || (other.answer("wake", "s", "?").await.len() == 1).then_some(())).await;
    assert_eq!(owner(&other, "wake", "s").await, Some(number(&one)));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_key_sent_to_two_hosts_at_once_runs_one_turn() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("count", "", counter()).await.expect("valid");
    until(async || other.agents.agent("count").ok()).await;
    for round in 0..20 {
        let session = format!("s{round}");
        let send = async |host: &crate::AgentHost| {
            let run = host.invoke(keyed("count", &session, "go")).await.expect("taken");
            (run.turn_id().to_owned(), run.outcome().await.expect("it succeeds").text)
        };
        let (first, second) = tokio::join!(send(&one.agents), send(&other.agents));
        assert_eq!(first, second);
        assert_eq!(one.agents.session("count", &session).await.expect("there").summary.turns, 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_is_cancelled_from_another_host_and_with_its_caller() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("spin", PATIENT, spinner()).await.expect("valid");
    until(async || other.agents.agent("spin").ok()).await;
    one.answer("spin", "s", "hello").await;

    let mut run = other.agents.invoke(detached("spin", "spin")).await.expect("taken");
    let id = run.turn_id().to_owned();
    assert_eq!(run.next().await.expect("it runs").expect("well"), RunEvent::Started { turn: 2 });
    other.agents.cancel_turn("spin", "s", &id).await.expect("the owner cancels it");
    assert_eq!(run.outcome().await.expect_err("cancelled").code(), "cancelled");

    let mut run = other.agents.invoke(invocation("spin", "s", "spin")).await.expect("taken");
    let id = run.turn_id().to_owned();
    assert_eq!(run.next().await.expect("it runs").expect("well"), RunEvent::Started { turn: 2 });
    drop(run);
    until(async || {
        let turn = one.agents.turn("spin", "s", &id).await.expect("kept");
        matches!(turn.phase, TurnPhase::Failed { code, .. } if code == "cancelled").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_has_not_reached_its_host_is_sent_again() {
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("count", "", counter()).await.expect("valid");
    until(async || other.agents.agent("count").ok()).await;
    assert_eq!(one.answer("count", "s", "go").await, "x");
    let removed = cluster.calls.hosts().remove(&number(&one)).expect("it is there");
    let comes_back = async {
        until(async || (cluster.calls.unreached.load(Ordering::Acquire) > 1).then_some(())).await;
        cluster.calls.hosts().insert(number(&one), removed);
    };
    let (answer, ()) = tokio::join!(other.answer("count", "s", "go"), comes_back);
    assert_eq!(answer, "xx", "although the message ends with its caller");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tool_call_whose_host_does_not_answer_times_out_and_is_cancelled_once_it_arrives() {
    let Some((cluster, one, other)) = Cluster::of_two(granting(&["agent:*/*"])).await else { return };
    let slow = finder("", "(loop $again (br $again))", 50);
    one.deploy("slow", PATIENT, slow).await.expect("valid");
    one.deploy("desk", &granted("\"agent:slow/find\""), timed_caller()).await.expect("valid");
    until(async || other.agents.agent("desk").ok()).await;
    one.ask("slow", "desk~s", "agent:none/find").await.expect("the error is its reply");
    cluster.calls.holds.send_replace(true);
    let answer = other.answer("desk", "s", "agent:slow/find");
    let answer = tokio::time::timeout(Duration::from_secs(60), answer).await.expect("it does not wait");
    assert_eq!(answer, "{", "after 50 ms, and one letter says that");
    assert_eq!(owner(&other, "slow", "desk~s").await, Some(number(&one)));
    cluster.calls.holds.send_replace(false);
    until(async || {
        let newest = one.agents.turns("slow", "desk~s", None, 1).await.expect("readable").pop()?;
        matches!(newest.phase, TurnPhase::Failed { code, .. } if code == "cancelled").then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_another_host_is_not_changed_as_a_whole() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("count", "", counter()).await.expect("valid");
    until(async || other.agents.agent("count").ok()).await;
    one.answer("count", "s", "go").await;
    let refused = other.agents.delete_session("count", "s").await.expect_err("it belongs to the first host");
    assert_eq!(refused.code(), "session_elsewhere");
    assert!(refused.retry_after_ms().is_some());
    assert_eq!(other.agents.expire_sessions(u64::MAX >> 1).await.expect("it skips the session"), 0);
    one.agents.delete_session("count", "s").await.expect("its owner deletes it");
    assert_eq!(other.answer("count", "s", "go").await, "x", "the session begins again");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_invalid_message_is_refused_with_the_error_of_the_owner() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("echo", "", echo()).await.expect("valid");
    until(async || other.agents.agent("echo").ok()).await;
    one.answer("echo", "s", "hello").await;
    let send = async |text: &str| {
        let message = Invocation { idempotency_key: Some("k".into()), ..invocation("echo", "s", text) };
        other.agents.invoke(message).await.map(drop)
    };
    send("first").await.expect("taken");
    let error = send("second").await.expect_err("the key belongs to another message");
    assert_eq!(error.code(), "invalid_message", "{error}");
}
