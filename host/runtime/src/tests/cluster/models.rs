//! Hosts with different models: agents run anywhere, and their generations at a host that has the model.

use super::{Cluster, number};
use crate::{
    RunEvent, RuntimeOptions,
    tests::{
        fixture::{Host, Setup, tiny_engine, until},
        inference::chatter,
    },
};
use skep_engine::{ModelSet, ServedModel, Usage};
use std::time::Duration;

/// Waits until a host knows a model of another one.
async fn knows(host: &Host, model: &str) -> ServedModel {
    until(async || host.agents.models().find(Some(model)).ok()).await
}

/// Runs a turn, and returns the events of its run before its end, and its usage.
async fn events(host: &Host, session: &str, text: &str) -> (Vec<RunEvent>, Usage) {
    let mut run = host.invoke("chat", session, text).await.expect("taken");
    let mut events = Vec::new();
    loop {
        match run.next().await.expect("the turn ends").expect("the turn succeeds") {
            RunEvent::Done(outcome) => return (events, outcome.usage),
            event => events.push(event),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_without_models_runs_agents_with_those_of_another_host() {
    let Some(cluster) = Cluster::new().await else { return };
    let gateway = cluster.host_with(ModelSet::empty(), RuntimeOptions::default()).await;
    let refused = gateway.deploy("chat", "", chatter()).await.expect_err("no host has a model");
    assert_eq!(refused.code(), "model_unknown", "{refused}");

    let computing = cluster.host(RuntimeOptions::default()).await;
    let model = knows(&gateway, "tiny").await;
    let own = computing.agents.models().find(Some("tiny")).expect("its own");
    assert_eq!((model.hosts(), model.digest()), (vec![number(&computing)], own.digest()));
    assert_eq!(model.context_length(), own.context_length());
    assert_eq!(gateway.agents.models().default_name(), "tiny", "the default of the other host");
    gateway.deploy("chat", "model = \"tiny\"", chatter()).await.expect("another host has the model");
    let (_, first) = events(&gateway, "s", "hello").await;
    assert!(first.prompt_tokens > 0 && first.completion_tokens > 0, "{first:?}");
    let (_, second) = events(&gateway, "s", "and again").await;
    assert!(second.cached_tokens > 0, "the session stays at its host, which has its pages: {second:?}");
    assert_eq!(computing.agents.loaded_sessions(), 0, "it only computes");

    let listed = gateway.agents.cluster_hosts().await.expect("listed");
    let models: Vec<usize> = listed.iter().map(|host| host.models.len()).collect();
    assert_eq!(models, [0, 1], "each host reports its own models");

    cluster.kill(computing);
    let gone = async || gateway.agents.models().find(Some("tiny")).is_err().then_some(());
    until(gone).await;
    gateway.ask("chat", "s", "hello").await.expect_err("nobody computes it");
    let _computing = cluster.host(RuntimeOptions::default()).await;
    knows(&gateway, "tiny").await;
    assert!(events(&gateway, "s", "once more").await.1.completion_tokens > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_starts_at_a_host_once_another_one_has_its_model() {
    let Some(cluster) = Cluster::new().await else { return };
    let computing = cluster.host(RuntimeOptions::default()).await;
    computing.deploy("chat", "model = \"tiny\"", chatter()).await.expect("valid");
    cluster.calls.hosts().remove(&number(&computing));
    drop(computing.stop().await);
    let gateway = cluster.host_with(ModelSet::empty(), RuntimeOptions::default()).await;
    let failed = gateway.agents.failed_agents();
    assert_eq!(failed.len(), 1, "no host has its model: {failed:?}");
    let _computing = cluster.host(RuntimeOptions::default()).await;
    until(async || gateway.agents.agent("chat").ok()).await;
    assert!(events(&gateway, "s", "hello").await.1.completion_tokens > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_has_the_same_model_wherever_its_session_is() {
    let Some(cluster) = Cluster::new().await else { return };
    let computing = cluster.host(RuntimeOptions::default()).await;
    computing.deploy("chat", "", chatter()).await.expect("valid");
    events(&computing, "s", "hello").await;
    let gateway = cluster.host_with(ModelSet::empty(), RuntimeOptions::default()).await;
    knows(&gateway, "tiny").await;
    until(async || gateway.agents.agent("chat").ok()).await;
    cluster.met(&[&computing, &gateway]).await;
    // A host that drains still computes for others, if nobody else can.
    computing.agents.hand_over(Duration::from_secs(30)).await;
    let (seen, usage) = events(&gateway, "s", "and again").await;
    assert!(usage.completion_tokens > 0 && usage.cached_tokens > 0, "{usage:?}");
    let is_change = |event: &RunEvent| matches!(event, RunEvent::ModelChanged { .. });
    assert!(!seen.iter().any(is_change), "{seen:?}");
    assert_eq!(gateway.agents.loaded_sessions(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn hosts_without_models_have_the_same_default_whenever_they_start() {
    let Some(cluster) = Cluster::new().await else { return };
    let early = cluster.host_with(ModelSet::empty(), RuntimeOptions::default()).await;
    assert_eq!(early.agents.models().default_name(), "", "no host has a model");
    let first = cluster.host_with(ModelSet::new(tiny_engine("first")), RuntimeOptions::default()).await;
    knows(&early, "first").await;
    let second = cluster.host_with(ModelSet::new(tiny_engine("second")), RuntimeOptions::default()).await;
    knows(&early, "second").await;
    assert_eq!(early.agents.models().default_name(), "first");
    assert_eq!(
        second.agents.models().default_name(),
        "second",
        "a host with models has a default of its own"
    );

    // The host of the default is gone when the next gateway starts.
    cluster.kill(first);
    until(async || early.agents.models().find(Some("first")).is_err().then_some(())).await;
    let late = cluster.host_with(ModelSet::empty(), RuntimeOptions::default()).await;
    knows(&late, "second").await;
    let defaults = [&early, &late].map(|host| host.agents.models().default_name());
    assert_eq!(defaults, ["first", "first"]);
    let refused = late.agents.models().find(None).err().expect("no host has it now").to_string();
    assert!(refused.contains("first"), "{refused}");

    let setup = Setup { default_model: Some("second".to_owned()), ..Setup::default() };
    let set = cluster.host_with(ModelSet::empty(), setup).await;
    knows(&set, "second").await;
    assert_eq!(set.agents.models().default_name(), "second", "the settings decide");
}
