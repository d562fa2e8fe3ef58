//! The work of a host that died continues on another one.

use super::{Cluster, number, owner};
use crate::{
    Invocation, RunEvent, RuntimeOptions, TurnPhase,
    tests::{
        durability::detached,
        fixture::{Host, invocation, until},
        guest::{counter, spinner},
        tools::{caller, echoing, granted, granting},
        waker::waker,
    },
};
use futures::future::{join_all, try_join_all};
use skep_store::{AgentRow, BatchRoom, Claim, Fault, Moment, NewFile, NewTurn, Queued};
use std::time::Duration;

const ASKS: &str = "[tools.find]\napproval = true";
const TOOL: &str = "agent:orders/find";

/// Deploys an agent whose calls need a person, and waits until both hosts have it.
async fn deploy_asking(one: &Host, other: &Host) {
    one.deploy("orders", ASKS, echoing()).await.expect("valid");
    one.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    until(async || other.agents.agent("desk").ok()).await;
}

/// Waits for the request of a person's decision.
async fn asked(host: &Host) -> String {
    until(async || host.agents.approvals(None, 10).await.expect("listed").pop()).await.id
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_continues_on_another_host_and_its_followers_see_each_event_once() {
    let Some((cluster, one, other)) = Cluster::of_two(granting(&["agent:*/*"])).await else { return };
    deploy_asking(&one, &other).await;
    one.ask("desk", "s", "agent:none/find").await.expect("the error is its reply");
    let mut run = other.agents.invoke(detached("desk", TOOL)).await.expect("taken");
    let approval = asked(&other).await;
    let mut seen = vec![run.next().await.expect("it runs").expect("well")];
    seen.push(run.next().await.expect("it asks").expect("well"));
    assert!(matches!(&seen[1], RunEvent::ApprovalRequired { .. }), "{seen:?}");

    cluster.kill(one);
    until(async || (owner(&other, "desk", "s").await == Some(number(&other))).then_some(())).await;
    other.agents.decide(&approval, true, None, "tester").await.expect("still open");
    while let Some(event) = run.next().await {
        seen.push(event.expect("the turn succeeds"));
    }
    let [
        RunEvent::Started { turn: 2 },
        RunEvent::ApprovalRequired { .. },
        RunEvent::ApprovalDecided { approved: true, .. },
        RunEvent::Done(outcome),
    ] = seen.as_slice()
    else {
        panic!("{seen:?}")
    };
    assert_eq!(outcome.text, r#"{"id":1}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_to_a_dead_host_is_accepted_once_its_session_is_taken() {
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("count", "", counter()).await.expect("valid");
    until(async || other.agents.agent("count").ok()).await;
    assert_eq!(one.answer("count", "s", "go").await, "x");
    cluster.met(&[&one, &other]).await;
    cluster.kill(one);
    let keyed = Invocation { idempotency_key: Some("k".into()), ..invocation("count", "s", "go") };
    let outcome = other.agents.invoke(keyed).await.expect("taken").outcome().await;
    assert_eq!(outcome.expect("it runs here").text, "xx");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_ends_with_its_caller_fails_with_the_host_that_runs_it() {
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    until(async || other.agents.agent("spin").ok()).await;
    one.answer("spin", "s", "hello").await;
    let mut run = other.agents.invoke(invocation("spin", "s", "spin")).await.expect("taken");
    assert_eq!(run.next().await.expect("it runs").expect("well"), RunEvent::Started { turn: 2 });
    cluster.kill(one);
    run.outcome().await.expect_err("its host is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn alarms_and_waiting_turns_of_a_dead_host_run_on_another_one() {
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("wake", "", waker()).await.expect("valid");
    one.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    until(async || other.agents.agent("spin").ok()).await;
    assert_eq!(one.answer("wake", "s", "a").await, "", "the alarm is set");
    let spins = one.agents.invoke(detached("spin", "spin")).await.expect("taken").turn_id().to_owned();
    let waits = one.agents.invoke(detached("spin", "hello")).await.expect("taken").turn_id().to_owned();
    cluster.kill(one);
    until(async || (other.answer("wake", "s", "?").await.len() == 1).then_some(())).await;
    until(async || (owner(&other, "spin", "s").await == Some(number(&other))).then_some(())).await;
    other.agents.cancel_turn("spin", "s", &spins).await.expect("it runs here");
    let outcome = other.agents.follow("spin", "s", &waits).await.expect("kept").outcome().await;
    assert_eq!(outcome.expect("it was only waiting").text, "hello");
    let spun = other.agents.turn("spin", "s", &spins).await.expect("kept").phase;
    assert!(matches!(spun, TurnPhase::Failed { ref code, .. } if code == "cancelled"), "{spun:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn removes_the_unfinished_writes_of_a_dead_host() {
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    cluster.met(&[&one, &other]).await;
    let file = |bytes: usize| NewFile {
        id: format!("file of {bytes}"),
        principal: "local".into(),
        name: "requests.jsonl".into(),
        purpose: "batch".into(),
        at_ms: 1,
        expires_at_ms: u64::MAX >> 1,
        body: vec![0; bytes].into(),
    };
    // Other writes of the host may come in between.
    let mut writes = 0;
    one.store().faults().choose(move |moment| {
        writes += u32::from(moment == Moment::Write);
        (moment == Moment::Write && writes > 5).then_some(Fault::Fails(10))
    });
    let room = BatchRoom { bytes: 16 << 20, batches: 1, share: None };
    one.store().store_file(file(8 << 20), room).await.expect_err("it has many parts");
    assert_eq!(other.store().store_file(file(1), room).await.expect("writable"), Queued::Full);
    cluster.kill(one);
    until(async || {
        let stored = other.store().store_file(file(1), room).await.expect("writable");
        (stored == Queued::New).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decision_that_is_made_on_the_wrong_host_wakes_the_turn() {
    let Some((_cluster, one, other)) = Cluster::of_two(granting(&["agent:*/*"])).await else { return };
    deploy_asking(&one, &other).await;
    let run = one.agents.invoke(detached("desk", TOOL)).await.expect("taken");
    let approval = asked(&other).await;
    let place = other.agents.place_of_approval(&approval).await.expect("known");
    assert!(matches!(place, crate::SessionPlace::There(member) if member.number == number(&one)));
    other.agents.decide(&approval, true, None, "tester").await.expect("still open");
    assert_eq!(run.outcome().await.expect("it continues").text, r#"{"id":1}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_hosts_that_are_left_share_the_sessions_of_a_dead_one() {
    const SESSIONS: usize = 2_000;
    /// The number that a host takes at least before the other one has looked.
    const LEAST: usize = 64;
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    let third = cluster.host(RuntimeOptions::default()).await;
    cluster.met(&[&one, &other, &third]).await;
    let sessions: Vec<String> = (0..SESSIONS).map(|number| format!("s{number}")).collect();
    let claims = join_all(sessions.iter().map(|session| one.store().claim_session("none", session))).await;
    assert!(claims.iter().all(|claim| matches!(claim, Ok(Claim::Ours { .. }))));
    // Their agent cannot start, so they stay open, and only their sessions find an owner.
    let row = AgentRow {
        name: "none".into(),
        manifest: "name = \"none\"\nmodel = \"none\"".into(),
        digest: "none".into(),
        deployed_at_ms: 1,
        deployed_by: "tester".into(),
    };
    one.store().put_agent(&row, &echoing().component(), &[]).await.expect("stored");
    let turns = sessions.iter().map(|session| {
        one.store().accept_turn(NewTurn {
            id: format!("turn of {session}"),
            agent: "none".into(),
            session: session.clone(),
            idempotency_key: None,
            digest: "none".into(),
            input: Vec::new(),
            seed: Vec::new(),
            accepted_at_ms: 1,
            number: None,
        })
    });
    try_join_all(turns).await.expect("stored");
    cluster.kill(one);
    let owned = async |host: &Host| host.store().open_turns().await.expect("readable").len();
    until(async || {
        tokio::time::sleep(Duration::from_millis(50)).await;
        (owned(&other).await + owned(&third).await == SESSIONS).then_some(())
    })
    .await;
    let (others, thirds) = (owned(&other).await, owned(&third).await);
    assert!(others >= LEAST && thirds >= LEAST, "{others} and {thirds}");
}
