//! Sessions that nobody owns begin where there is room, or where their agent is warm.

use super::{Cluster, number, owner};
use crate::{
    RuntimeOptions,
    cluster::Facts,
    tests::{
        doer::keyed,
        durability::detached,
        fixture::{Host, narrow_engine, until},
        guest::{counter, echo, spinner},
    },
};
use skep_engine::ModelSet;
use std::sync::atomic::Ordering;

/// Starts two hosts that compute two sequences at once, and have the agents `count`, `echo` and `spin`.
async fn two_narrow_hosts() -> Option<(Cluster, Host, Host)> {
    let mut cluster = Cluster::new().await?;
    cluster.models = ModelSet::new(narrow_engine("tiny", 2));
    let one = cluster.placing_host(RuntimeOptions::default()).await;
    let other = cluster.placing_host(RuntimeOptions::default()).await;
    one.deploy("count", "", counter()).await.expect("valid");
    one.deploy("echo", "", echo()).await.expect("valid");
    one.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    for agent in ["count", "echo", "spin"] {
        until(async || other.agents.agent(agent).ok()).await;
    }
    cluster.met(&[&one, &other]).await;
    Some((cluster, one, other))
}

/// Gives a host as many turns as it computes sequences: one that runs, and one that waits behind it. Returns the first one.
async fn occupy(host: &Host) -> String {
    let spins = host.agents.invoke(detached("spin", "spin")).await.expect("taken").turn_id().to_owned();
    host.agents.invoke(detached("spin", "hello")).await.expect("taken");
    assert_eq!(owner(host, "spin", "s").await, Some(number(host)));
    spins
}

/// Waits until another host has reported that an agent is warm there and no turn runs, and `host` has read it.
async fn knows_warm(host: &Host, other: &Host) {
    until(async || {
        let rows = host.store().live_hosts().await.expect("listed");
        let row = rows.iter().find(|row| row.number == number(other))?;
        let Facts { warm, load, .. } = Facts::of(row)?;
        (!warm.is_empty() && load.running_turns == 0).then_some(())
    })
    .await;
    host.agents.cluster_hosts().await.expect("listed");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_of_a_busy_host_begins_on_another_one_and_owned_sessions_stay() {
    let Some((_cluster, one, other)) = two_narrow_hosts().await else { return };
    assert_eq!(one.answer("count", "mine", "go").await, "x");
    assert_eq!(owner(&one, "count", "mine").await, Some(number(&one)), "there was room");
    let spins = occupy(&one).await;
    // A report that is late says nothing, so not every session has to begin elsewhere.
    let mut begun = 0;
    let moved = until(async || {
        begun += 1;
        let session = format!("new-{begun}");
        assert_eq!(one.answer("count", &session, "go").await, "x");
        (owner(&one, "count", &session).await == Some(number(&other))).then_some(session)
    })
    .await;
    assert_eq!(one.answer("count", &moved, "go").await, "xx", "its owner gets the next message");
    assert_eq!(one.answer("count", "mine", "go").await, "xx");
    assert_eq!(owner(&one, "count", "mine").await, Some(number(&one)), "it has an owner");
    let hosts = other.agents.cluster_hosts().await.expect("listed");
    let busy = hosts.iter().find(|host| host.number == number(&one)).expect("it is there");
    assert!(busy.load_percent.is_some(), "{busy:?}");
    one.agents.cancel_turn("spin", "s", &spins).await.expect("it runs");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_begins_where_its_agent_is_warm() {
    let Some((_cluster, one, other)) = two_narrow_hosts().await else { return };
    assert_eq!(other.answer("count", "first", "go").await, "x");
    assert_eq!(owner(&other, "count", "first").await, Some(number(&other)), "it is warm nowhere");
    knows_warm(&one, &other).await;
    assert_eq!(one.answer("count", "second", "go").await, "x");
    assert_eq!(owner(&one, "count", "second").await, Some(number(&other)));
    one.answer("echo", "s", "hello").await;
    assert_eq!(owner(&one, "echo", "s").await, Some(number(&one)), "another agent is cold at both");
    // It is warm at both now, and stays where its messages arrive.
    one.answer("echo", "t", "hello").await;
    assert_eq!(owner(&one, "echo", "t").await, Some(number(&one)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_chosen_host_cannot_be_reached_runs_once_at_the_host_that_got_it() {
    let Some((cluster, one, other)) = two_narrow_hosts().await else { return };
    let spins = occupy(&one).await;
    let removed = cluster.calls.hosts().remove(&number(&other)).expect("it is there");
    let mut begun = 0;
    until(async || {
        begun += 1;
        let (attached, durable) = (format!("attached-{begun}"), format!("durable-{begun}"));
        assert_eq!(one.answer("count", &attached, "go").await, "x");
        let run = one.agents.invoke(keyed("count", &durable, "go")).await.expect("taken");
        assert_eq!(run.outcome().await.expect("it runs here").text, "x");
        for session in [attached, durable] {
            assert_eq!(owner(&one, "count", &session).await, Some(number(&one)));
            assert_eq!(one.agents.session("count", &session).await.expect("there").summary.turns, 1);
        }
        (cluster.calls.unreached.load(Ordering::Acquire) > 0).then_some(())
    })
    .await;
    cluster.calls.hosts().insert(number(&other), removed);
    one.agents.cancel_turn("spin", "s", &spins).await.expect("it runs");
}
