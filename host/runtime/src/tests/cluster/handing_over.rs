//! A host that ends gives its sessions to the others without a failed turn.

use super::{Cluster, number, owner};
use crate::{
    Invocation, RuntimeOptions, SessionPlace,
    tests::{
        doer::keyed,
        durability::detached,
        fixture::{Host, invocation, until},
        guest::{counter, echo},
        tools::{caller, echoing, granted, granting},
    },
};
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

const DEADLINE: Duration = Duration::from_secs(60);
const SESSIONS: usize = 6;

/// Sends messages to a session that has had one, until it is to stop: attached ones and durable ones in turn. Returns the number of
/// its turns.
async fn send(host: &Host, session: &str, stops: &AtomicBool) -> usize {
    let mut sent = 1;
    while !stops.load(Ordering::Acquire) {
        let message = invocation("echo", session, "go");
        let message = match sent % 3 {
            0 => message,
            1 => Invocation { detached: true, ..message },
            _ => Invocation { idempotency_key: Some(format!("k{sent}")), ..message },
        };
        let outcome = host.agents.invoke(message).await.expect("taken").outcome().await;
        sent += 1;
        assert_eq!(outcome.expect("no turn fails").turn, sent as u64);
    }
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_under_load_move_without_a_failed_turn() {
    let Some((cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("echo", "", echo()).await.expect("valid");
    until(async || other.agents.agent("echo").ok()).await;
    cluster.met(&[&one, &other]).await;
    let names: Vec<String> = (0..SESSIONS).map(|session| format!("s{session}")).collect();
    for name in &names {
        // The first host owns them, and half of the messages are sent to the second one.
        one.answer("echo", name, "go").await;
    }
    let stops = AtomicBool::new(false);
    let load = futures::future::join_all(names.iter().enumerate().map(|(index, name)| {
        let host = if index % 2 == 0 { &one } else { &other };
        send(host, name, &stops)
    }));
    let moving = async {
        until(async || {
            let first = one.agents.session("echo", "s0").await.ok()?;
            (first.summary.turns > 5).then_some(())
        })
        .await;
        one.agents.hand_over(DEADLINE).await;
        assert!(one.agents.is_draining());
        let listed = one.agents.cluster_hosts().await.expect("listed");
        let this = listed.iter().find(|host| host.is_this).expect("it is still there");
        assert!(this.is_draining);
        // Both hosts still take messages.
        let before = other.agents.session("echo", "s0").await.expect("there").summary.turns;
        until(async || {
            let now = other.agents.session("echo", "s0").await.expect("there").summary.turns;
            (now > before + 5).then_some(())
        })
        .await;
        stops.store(true, Ordering::Release);
    };
    let (sent, ()) = tokio::join!(load, moving);
    for (name, sent) in names.iter().zip(sent) {
        assert_eq!(other.agents.session("echo", name).await.expect("there").summary.turns, sent as u64);
        assert_eq!(owner(&other, "echo", name).await, Some(number(&other)));
    }
    assert_eq!(one.agents.loaded_sessions(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_last_host_has_nobody_to_hand_over_to() {
    let Some(cluster) = Cluster::new().await else { return };
    let host = cluster.host(RuntimeOptions::default()).await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    let began = Instant::now();
    host.agents.hand_over(DEADLINE).await;
    assert!(began.elapsed() < DEADLINE / 2);
    assert_eq!(host.answer("count", "s", "go").await, "xx", "it works until it is drained");
    host.agents.drain(Duration::ZERO).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_turn_that_waits_for_a_person_does_not_delay_the_end_of_its_host() {
    let Some((cluster, one, other)) = Cluster::of_two(granting(&["agent:*/*"])).await else { return };
    one.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    one.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    until(async || other.agents.agent("desk").ok()).await;
    cluster.met(&[&one, &other]).await;
    let id =
        one.agents.invoke(detached("desk", "agent:orders/find")).await.expect("taken").turn_id().to_owned();
    let approval = until(async || one.agents.approvals(None, 10).await.expect("listed").pop()).await.id;
    let began = Instant::now();
    one.agents.hand_over(DEADLINE).await;
    assert!(began.elapsed() < DEADLINE / 2, "a person may take days");
    let place = other.agents.place_of_approval(&approval).await.expect("known");
    assert!(matches!(place, SessionPlace::There(_)), "the turn is still there");
    one.agents.drain(Duration::ZERO).await;
    cluster.kill(one);
    until(async || (owner(&other, "desk", "s").await == Some(number(&other))).then_some(())).await;
    other.agents.decide(&approval, true, None, "tester").await.expect("still open");
    let outcome = until(async || {
        let run = other.agents.follow("desk", "s", &id).await.ok()?;
        Some(run.outcome().await)
    });
    assert_eq!(outcome.await.expect("it continues").text, r#"{"id":1}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_whose_turn_runs_at_a_host_that_drains_is_followed_there() {
    let Some((cluster, one, other)) = Cluster::of_two(granting(&["agent:*/*"])).await else { return };
    one.deploy("orders", "[tools.find]\napproval = true", echoing()).await.expect("valid");
    one.deploy("desk", &granted("\"agent:orders/find\""), caller()).await.expect("valid");
    until(async || other.agents.agent("desk").ok()).await;
    cluster.met(&[&one, &other]).await;
    let message = || keyed("desk", "s", "agent:orders/find");
    let run = one.agents.invoke(message()).await.expect("taken");
    let approval = until(async || one.agents.approvals(None, 10).await.expect("listed").pop()).await.id;
    one.agents.hand_over(DEADLINE).await;
    until(async || {
        let hosts = other.agents.cluster_hosts().await.expect("listed");
        hosts.iter().any(|host| host.is_draining).then_some(())
    })
    .await;
    let again = tokio::time::timeout(DEADLINE / 4, other.agents.invoke(message())).await;
    let again = again.expect("it does not wait for the end of the turn").expect("taken");
    assert_eq!(again.turn_id(), run.turn_id());
    let different = Invocation { text: "other".into(), ..message() };
    let refused = other.agents.invoke(different).await.map(drop).expect_err("the key is taken");
    assert_eq!(refused.code(), "invalid_message", "{refused}");
    other.agents.decide(&approval, true, None, "tester").await.expect("still open");
    assert_eq!(again.outcome().await.expect("it continues").text, r#"{"id":1}"#);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_that_remembers_too_many_sessions_gives_some_back() {
    let Some(cluster) = Cluster::new().await else { return };
    // Eight sessions are remembered.
    let options = RuntimeOptions { max_sessions_loaded: 2, ..RuntimeOptions::default() };
    let host = cluster.host(options).await;
    host.deploy("count", "", counter()).await.expect("valid");
    for session in 0..20 {
        assert_eq!(host.answer("count", &session.to_string(), "go").await, "x");
    }
    until(async || {
        let listed = host.agents.cluster_hosts().await.expect("listed");
        (listed[0].sessions <= 8).then_some(())
    })
    .await;
    assert_eq!(owner(&host, "count", "0").await, None, "the first one was used longest ago");
    assert_eq!(host.answer("count", "0", "go").await, "xx", "it is claimed again");
}
