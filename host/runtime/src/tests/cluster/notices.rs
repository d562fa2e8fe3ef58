//! A change that one host makes is seen by the others within a second.

use super::{Cluster, number, owner};
use crate::{
    NewApiKey, NewWebhook, Role, RuntimeOptions, Tenant, TopicPattern,
    tests::{
        durability::detached,
        fixture::until,
        guest::{counter, echo, spinner},
    },
};
use skep_outbound::AddressPolicy;
use std::time::{Duration, Instant};

/// The time within which the other hosts see a change, and some for a machine under load.
const SOON: Duration = Duration::from_secs(3);

/// Waits for a change, which the other host sees soon.
async fn soon<T>(look: impl AsyncFnMut() -> Option<T>) -> T {
    let began = Instant::now();
    let found = until(look).await;
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn agents_are_deployed_rolled_back_and_deleted_on_all_hosts() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    one.deploy("a", "", echo()).await.expect("valid");
    soon(async || other.agents.agent("a").ok()).await;
    assert_eq!(other.answer("a", "s", "hello").await, "hello");
    one.deploy("a", "", counter()).await.expect("valid");
    soon(async || (other.agents.agent("a").ok()?.summary.version == 2).then_some(())).await;
    assert_eq!(other.answer("a", "s", "hello").await, "x", "the next turn runs the new version");
    other.agents.rollback("a", None).await.expect("kept");
    soon(async || (one.agents.agent("a").ok()?.summary.version == 1).then_some(())).await;

    // The sessions of the deleted agent do not appear in the next one of its name.
    one.agents.delete("a").await.expect("there");
    one.deploy("a", "", counter()).await.expect("valid");
    let digest = one.agents.agent("a").expect("it was just deployed").summary.digest;
    soon(async || (other.agents.agent("a").ok()?.summary.digest == digest).then_some(())).await;
    until(async || (other.ask("a", "s", "go").await.ok()?.text == "x").then_some(())).await;
    one.agents.delete("a").await.expect("there");
    soon(async || other.agents.agent("a").err()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_answers_on_all_hosts_as_soon_as_it_is_deployed_on_one() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    for number in 0..5 {
        let name = format!("a{number}");
        one.deploy(&name, "", echo()).await.expect("valid");
        assert_eq!(other.answer(&name, "s", "hello").await, "hello");
    }
    let missing = other.ask("nobody", "s", "hello").await.expect_err("no host has it");
    assert_eq!(missing.code(), "agent_not_found");
}

fn new_key() -> NewApiKey {
    NewApiKey {
        tenant: Tenant::new("acme").expect("a name"),
        role: Role::Invoke,
        agents: None,
        name: "ci".into(),
        expires_in: None,
        requests_per_minute: None,
        bodies: false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_are_valid_and_revoked_on_all_hosts() {
    let Some((_cluster, one, other)) = Cluster::of_two(RuntimeOptions::default()).await else { return };
    let (key, secret) = one.agents.keys().create(new_key()).await.expect("made");
    soon(async || other.agents.keys().authenticate(&secret).await.ok()).await;
    other.agents.keys().revoke(&key.id).await.expect("there");
    soon(async || one.agents.keys().authenticate(&secret).await.err()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_active_although_a_deployment_is_not_complete() {
    let Some(cluster) = Cluster::new().await else { return };
    let one = cluster.host(RuntimeOptions::default()).await;
    let other = cluster.host(RuntimeOptions { max_instances: 1, ..RuntimeOptions::default() }).await;
    one.deploy("spin", "[limits]\ncpu_ms = 60000", spinner()).await.expect("valid");
    cluster.met(&[&one, &other]).await;
    soon(async || other.agents.agent("spin").ok()).await;
    // A turn has the only instance of the other host, which needs one to start an agent.
    let mut run = other.agents.invoke(detached("spin", "spin")).await.expect("taken");
    run.next().await.expect("it runs").expect("well");
    assert_eq!(owner(&other, "spin", "s").await, Some(number(&other)));
    one.deploy("late", "", echo()).await.expect("valid");

    let (key, secret) = one.agents.keys().create(new_key()).await.expect("made");
    soon(async || other.agents.keys().authenticate(&secret).await.ok()).await;
    one.agents.keys().revoke(&key.id).await.expect("there");
    soon(async || other.agents.keys().authenticate(&secret).await.err()).await;
    other.agents.agent("late").expect_err("it waits for the instance");
    let behind = one.agents.hosts_behind(Duration::from_millis(600)).await.expect("readable");
    assert_eq!(behind, ["http://127.0.0.1:1"]);
    other.agents.cancel_turn("spin", "s", run.turn_id()).await.expect("it runs");
    assert!(one.agents.hosts_behind(Duration::from_secs(60)).await.expect("readable").is_empty());
    other.agents.agent("late").expect("it is started there");
}

#[tokio::test(flavor = "multi_thread")]
async fn webhooks_are_added_and_removed_on_all_hosts() {
    let addresses = AddressPolicy { allow_private: vec!["127.0.0.1:9".parse().expect("an address")] };
    let outbound = skep_outbound::Options { addresses, ..skep_outbound::Options::default() };
    let options = RuntimeOptions { outbound, ..RuntimeOptions::default() };
    let Some((_cluster, one, other)) = Cluster::of_two(options).await else { return };
    let webhook = NewWebhook {
        url: "http://127.0.0.1:9/hook".into(),
        topics: vec![TopicPattern::new("order.*").expect("a pattern")],
        secret: None,
    };
    let (added, _secret) = one.agents.add_webhook(webhook).await.expect("valid");
    soon(async || other.agents.webhooks().into_iter().find(|known| *known == added)).await;
    other.agents.remove_webhook(&added.id).await.expect("there");
    soon(async || one.agents.webhooks().is_empty().then_some(())).await;
}
