//! Tests of versions: activation is atomic, an old version can be reactivated, and a running turn
//! keeps its version.

use super::{
    fixture::{Host, Setup, until},
    guest::{Guest, counter, echo},
    parallel_calls::{GATE, Gate, calling},
    tools::{granted, granting},
};
use std::{
    sync::Arc,
    thread::{self, JoinHandle},
};
use tokio::runtime::Handle;

const REPLY: &str = "(local.set $text (i32.const 512)) (local.set $length (i32.const 3))";

fn one() -> Guest {
    Guest { module: r#"(data (i32.const 512) "one")"#, on_message: REPLY, ..Guest::default() }
}

fn two() -> Guest {
    Guest { module: r#"(data (i32.const 512) "two")"#, on_message: REPLY, ..Guest::default() }
}

async fn active_versions(host: &Host, agent: &str) -> Vec<(u64, bool)> {
    let versions = host.agents.versions(agent).await.expect("the agent exists");
    versions.iter().map(|version| (version.version, version.is_active)).collect()
}

#[tokio::test]
async fn a_rollback_survives_a_restart() {
    let host = Host::start().await;
    assert_eq!(host.deploy("a", "", one()).await.expect("valid").version, 1);
    assert_eq!(host.deploy("a", "", two()).await.expect("valid").version, 2);
    assert_eq!(host.answer("a", "s", "go").await, "two");

    assert_eq!(host.agents.rollback("a", None).await.expect("there is an earlier version").version, 1);
    assert_eq!(host.answer("a", "s", "go").await, "one");
    assert_eq!(active_versions(&host, "a").await, [(2, false), (1, true)]);
    let host = host.restart().await;
    assert_eq!(host.answer("a", "s", "go").await, "one");

    assert_eq!(host.agents.rollback("a", Some(2)).await.expect("the version is kept").version, 2);
    assert_eq!(host.deploy("a", "", echo()).await.expect("valid").version, 3);
    assert_eq!(active_versions(&host, "a").await, [(3, true), (2, false), (1, false)]);
    let versions = host.agents.versions("a").await.expect("the agent exists");
    assert!(versions.iter().all(|version| version.deployed_by == "tester" && version.deployed_at_ms > 0));
}

#[tokio::test]
async fn redeploying_the_active_version_keeps_its_number() {
    let host = Host::start().await;
    for (limits, guest, version) in [
        ("", one(), 1),
        ("", one(), 1),
        ("[limits]\ncpu_ms = 900", one(), 2),
        ("", one(), 3),
        ("", two(), 4),
        ("", two(), 4),
    ] {
        assert_eq!(host.deploy("a", limits, guest).await.expect("valid").version, version);
    }
    assert_eq!(active_versions(&host, "a").await, [(4, true), (3, false), (2, false), (1, false)]);
    let host = host.restart().await;
    assert_eq!(host.deploy("a", "", two()).await.expect("valid").version, 4);
    host.agents.rollback("a", Some(1)).await.expect("the version is kept");
    assert_eq!(host.deploy("a", "", two()).await.expect("valid").version, 5);
    assert_eq!(host.answer("a", "s", "go").await, "two");
}

#[tokio::test]
async fn an_error_about_a_missing_version_lists_the_kept_ones() {
    let host = Host::start().await;
    host.deploy("a", "", one()).await.expect("valid");
    for (wanted, expected) in [(None, "no earlier version"), (Some(7), "no version 7")] {
        let error = host.agents.rollback("a", wanted).await.expect_err("there is no such version");
        assert_eq!(error.code(), "version_not_found");
        assert!(
            error.to_string().contains(expected) && error.to_string().contains("versions are: 1"),
            "{error}"
        );
    }
    assert_eq!(host.agents.rollback("b", None).await.expect_err("no agent").code(), "agent_not_found");
    assert_eq!(host.agents.versions("b").await.expect_err("no agent").code(), "agent_not_found");
    assert_eq!(host.answer("a", "s", "go").await, "one");
}

#[tokio::test]
async fn a_failed_deployment_leaves_the_old_version_active() {
    let host = Host::start().await;
    host.deploy("count", "", counter()).await.expect("valid");
    assert_eq!(host.answer("count", "s", "go").await, "x");
    let broken = Guest { describe: "unreachable", ..Guest::default() };
    host.deploy("count", "", broken).await.expect_err("the guest cannot describe itself");
    assert_eq!(active_versions(&host, "count").await, [(1, true)]);
    assert_eq!(host.answer("count", "s", "go").await, "xx");
}

#[tokio::test]
async fn a_rollback_that_would_take_a_route_of_another_agent_is_refused() {
    let host = Host::start().await;
    let route = "[[trigger.http]]\nroute = \"/door/{session}\"";
    host.deploy("a", route, one()).await.expect("the route is free");
    host.deploy("a", "", two()).await.expect("valid");
    host.deploy("b", route, echo()).await.expect("the route is free again");
    assert_eq!(
        host.agents.rollback("a", Some(1)).await.expect_err("the route is taken").code(),
        "invalid_route"
    );
    assert_eq!(host.answer("a", "s", "go").await, "two");
}

#[tokio::test]
async fn a_running_turn_finishes_on_its_version_and_the_next_uses_the_new_one() {
    let gate = Arc::<Gate>::default();
    let mut setup = Setup::from(granting(&["mcp:*/*"]));
    setup.tool_servers.insert("gate".to_owned(), gate.clone());
    let host = Host::with(setup).await;
    host.deploy("a", &granted(&format!("\"{GATE}\"")), calling(&[GATE])).await.expect("valid");
    let running = host.invoke("a", "s", "go").await.expect("taken");
    gate.reached.notified().await;
    host.deploy("a", "", two()).await.expect("valid");
    assert_eq!(host.answer("a", "other", "go").await, "two", "the new version is active");
    gate.opened.notify_one();
    assert_eq!(running.outcome().await.expect("the turn continues").text, r#"{"id":1}"#);
    assert_eq!(host.answer("a", "s", "go").await, "two");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_for_unknown_agents_and_changes_of_the_agents_never_block_each_other() {
    const ROUNDS: usize = 20_000;
    // The list of agents is read for the error of an unknown agent. A thread that held it meanwhile would wait for a change of the list
    // that waits for the thread.
    let host = Host::start().await;
    let mut working: Vec<JoinHandle<()>> = Vec::new();
    for _ in 0..2 {
        let agents = host.agents.clone();
        working.push(thread::spawn(move || {
            for _ in 0..ROUNDS {
                agents.agent("nobody").expect_err("no agent has this name");
            }
        }));
    }
    let (agents, runtime) = (host.agents.clone(), Handle::current());
    working.push(thread::spawn(move || {
        for _ in 0..ROUNDS {
            runtime.block_on(agents.delete("nobody")).expect_err("no agent has this name");
        }
    }));
    until(async || working.iter().all(JoinHandle::is_finished).then_some(())).await;
    for work in working {
        work.join().expect("each of them gets its error");
    }
}
