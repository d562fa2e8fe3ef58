//! Sessions that nobody owns begin where there is room, or where their agent is warm.
//!
//! Up to three turns compute until they are cancelled, so each test has a thread more for everything else.

use super::{Cluster, number, owner};
use crate::{
    BatchOptions, Invocation, Limits, RuntimeOptions,
    cluster::Facts,
    tests::{
        batches::{queue, results, turn},
        doer::keyed,
        durability::detached,
        fixture::{Host, invocation, narrow_engine, until},
        guest::{counter, echo, spinner},
        tools::{caller, echoing, granted, granting},
    },
};
use skep_engine::ModelSet;
use std::{sync::atomic::Ordering, time::Duration};

/// Creates a cluster whose hosts compute two sequences at once.
async fn narrow_cluster() -> Option<Cluster> {
    let mut cluster = Cluster::new().await?;
    cluster.models = ModelSet::new(narrow_engine("tiny", 2));
    Some(cluster)
}

/// Starts two hosts that compute two sequences at once, and have the agents `count`, `echo` and `spin`.
async fn two_narrow_hosts() -> Option<(Cluster, Host, Host)> {
    let (cluster, one, other) = narrow_hosts_with(RuntimeOptions::default()).await?;
    for agent in ["count", "echo", "spin"] {
        until(async || other.agents.agent(agent).ok()).await;
    }
    Some((cluster, one, other))
}

/// Starts such hosts, the second one with these options. Its agents may not have started yet.
async fn narrow_hosts_with(options: RuntimeOptions) -> Option<(Cluster, Host, Host)> {
    let cluster = narrow_cluster().await?;
    let one = cluster.placing_host(RuntimeOptions::default()).await;
    let other = cluster.placing_host(options).await;
    one.deploy("count", "", counter()).await.expect("valid");
    one.deploy("echo", "", echo()).await.expect("valid");
    one.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    cluster.met(&[&one, &other]).await;
    Some((cluster, one, other))
}

/// Makes a turn of a session run at a host until it is cancelled. Returns its id.
async fn spin(host: &Host, session: &str) -> String {
    let message = Invocation { session: session.into(), ..detached("spin", "spin") };
    let turn = host.agents.invoke(message).await.expect("taken").turn_id().to_owned();
    assert_eq!(owner(host, "spin", session).await, Some(number(host)));
    turn
}

/// Makes as many turns run at a host as it computes sequences. Returns their ids.
async fn occupy(host: &Host) -> [String; 2] {
    [spin(host, "s").await, spin(host, "t").await]
}

/// Ends such turns.
async fn free(host: &Host, turns: [String; 2]) {
    for (session, turn) in ["s", "t"].into_iter().zip(turns) {
        host.agents.cancel_turn("spin", session, &turn).await.expect("it runs");
    }
}

/// Sends messages that begin sessions to a host until another one, which was chosen for them, has refused one that ends with its
/// caller and one that outlives it. Each has to run once, at the host that got it.
async fn run_although_refused(cluster: &Cluster, host: &Host, agent: &str, text: &str, reply: &str) {
    let refusals = || cluster.calls.refusals.load(Ordering::Acquire);
    let (mut begun, mut were_refused) = (0, [false; 2]);
    until(async || {
        begun += 1;
        let (kind, before) = (begun % 2, refusals());
        let session = format!("new-{begun}");
        let message = match kind {
            0 => invocation(agent, &session, text),
            _ => keyed(agent, &session, text),
        };
        let outcome = host.agents.invoke(message).await.expect("taken").outcome().await;
        assert_eq!(outcome.expect("it runs here").text, reply);
        assert_eq!(owner(host, agent, &session).await, Some(number(host)));
        assert_eq!(host.agents.session(agent, &session).await.expect("there").summary.turns, 1);
        were_refused[kind] |= refusals() > before;
        tokio::time::sleep(Duration::from_millis(50)).await;
        (were_refused == [true; 2]).then_some(())
    })
    .await;
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
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
    free(&one, spins).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
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
    free(&one, spins).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_runs_here_if_its_agent_has_not_started_at_the_chosen_host() {
    let options = RuntimeOptions { max_component_bytes: 1, ..RuntimeOptions::default() };
    let Some((cluster, one, other)) = narrow_hosts_with(options).await else { return };
    until(async || (other.agents.failed_agents().len() == 3).then_some(())).await;
    let spins = occupy(&one).await;
    run_although_refused(&cluster, &one, "count", "go", "x").await;
    free(&one, spins).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_message_runs_here_if_a_limit_of_the_chosen_host_is_reached() {
    let ceilings = Limits { concurrent_turns: 1, ..Limits::default() };
    let options = RuntimeOptions { ceilings, ..RuntimeOptions::default() };
    let Some((cluster, one, other)) = narrow_hosts_with(options).await else { return };
    until(async || other.agents.agent("spin").ok()).await;
    let only = spin(&other, "only").await;
    let spins = occupy(&one).await;
    run_although_refused(&cluster, &one, "spin", "hello", "hello").await;
    free(&one, spins).await;
    other.agents.cancel_turn("spin", "only", &only).await.expect("it runs");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn items_of_a_batch_run_at_the_host_that_takes_them() {
    // The other host takes none.
    let batch = BatchOptions { max_running: 0, ..BatchOptions::default() };
    let options = RuntimeOptions { batch, ..RuntimeOptions::default() };
    let Some((_cluster, one, other)) = narrow_hosts_with(options).await else { return };
    until(async || other.agents.agent("count").ok()).await;
    let spins = occupy(&one).await;
    let id = queue(&one, "agent:count", vec![turn("go"), turn("go"), turn("go")]).await.expect("room");
    results(&one, &id).await;
    for position in 0..3 {
        let session = format!("batch-{id}-{position}");
        assert_eq!(owner(&one, "count", &session).await, Some(number(&one)), "item {position}");
    }
    free(&one, spins).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn turns_that_wait_for_people_take_no_room() {
    let Some(cluster) = narrow_cluster().await else { return };
    let host = cluster.placing_host(granting(&["agent:*/*"])).await;
    host.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    host.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    for session in ["s", "t"] {
        let message = Invocation { session: session.into(), ..detached("desk", "agent:orders/find") };
        host.agents.invoke(message).await.expect("taken");
    }
    until(async || (host.agents.approvals(None, 10).await.expect("listed").len() == 2).then_some(())).await;
    until(async || {
        let row = host.store().live_hosts().await.expect("listed").pop()?;
        let Facts { running_turns, load, .. } = Facts::of(&row)?;
        ((running_turns, load.running_turns) == (2, 0)).then_some(())
    })
    .await;
}
