//! Several hosts on one PostgreSQL database: a session is the same through each of them, and nothing is lost or doubled when
//! one of them fails, hangs or is replaced.

/// Keys, deployments and strangers.
mod access;
/// A database that is away.
mod away;
/// A balancer in front of the hosts.
mod balancer;
/// The owners of sessions while hosts fail.
mod epochs;
/// Hosts that are killed and hosts that hang.
mod failures;
/// A server that holds turns up.
mod gate;
/// Sessions of MCP clients.
mod mcp;
/// Hosts without a model, and hosts with different ones.
mod models;
/// KV pages of other hosts that come through NIXL.
mod nixl;
/// The hosts.
mod nodes;
/// KV pages of other hosts.
mod pages;
/// Rates that hosts keep together.
mod rates;
/// Hosts that are restarted one after the other.
mod rolling;
/// Prompts that one host computes for another one, and a balancer in front.
mod split;
/// Faults of the hosts that compute them.
mod split_faults;
/// Hosts of different versions.
mod versions;

use crate::console;
use crate::durability::tiny_model;
use crate::postgres_server::Server;
use gate::Gate;
use nodes::{Node, Site, until};
use reqwest::Method;
use serde_json::{Value, json};
use std::process::{Command, Stdio};

/// Deploys the agents of these tests at a host, and waits until the others know them.
async fn deploy(nodes: &[Node; 3]) {
    let [first, others @ ..] = nodes;
    first.deploy("state", "state", "").await;
    first.deploy("gate", "gate", "[grants]\nhosts = [\"*\"]").await;
    first.deploy("relay", "relay", "[grants]\ntools = [\"agent:gate/*\"]").await;
    let approved = "[grants]\ntools = [\"agent:gate/*\"]\n[tools.\"agent:gate/note\"]\napproval = true";
    first.deploy("relay", "careful", approved).await;
    for node in others {
        node.knows(&["state", "gate", "relay", "careful"]).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_used_through_any_host() {
    let Some(site) = Site::start(false).await else { return };
    let nodes = site.nodes().await;
    deploy(&nodes).await;
    let [a, b, c] = &nodes;

    // The host that gets the first message owns the session, and answers through the others.
    let (_, owner) = b.say("state/sessions/one", "increment n").await;
    assert_eq!(owner, b.number);
    let (answer, owner) = a.say("state/sessions/one", "increment n").await;
    assert_eq!((&answer["text"], &answer["turn"], owner), (&json!("2"), &json!(2), b.number));
    let (events, owner) = c.stream("state/sessions/one", "increment n").await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!((names.first(), names.last(), owner), (Some(&"turn"), Some(&"done"), b.number), "{events:?}");
    let (own, other) =
        (b.get("/v1/agents/state/sessions/one").await, a.get("/v1/agents/state/sessions/one").await);
    assert_eq!((own.0, &own.1, own.2), (other.0, &other.1, other.2));
    assert_eq!((&own.1["turns"], own.2), (&json!(3), b.number));

    a_turn_is_followed_and_cancelled_through_other_hosts(&nodes).await;

    // A copy of the session is the same through each host; a deleted one is gone for all, and may begin elsewhere.
    let export = "/v1/agents/state/sessions/one/export";
    let (one, two) = (a.get(export).await, c.get(export).await);
    assert_eq!((one.0, &one.1["turns"]), (200, &json!(3)), "{}", one.1);
    assert_eq!((&one.1["state"], &one.1["turns"]), (&two.1["state"], &two.1["turns"]));
    let forked = json!({"session": "two"});
    assert_eq!(c.ask(Method::POST, "/v1/agents/state/sessions/one/fork", forked).await.0, 201);
    assert_eq!(a.say("state/sessions/two", "get n").await.0["text"], "3");
    assert_eq!(c.ask(Method::DELETE, "/v1/agents/state/sessions/one", Value::Null).await.0, 204);
    for node in &nodes {
        let (status, gone, _) = node.get("/v1/agents/state/sessions/one").await;
        assert_eq!((status, &gone["error"]["code"]), (404, &json!("session_not_found")), "{gone}");
    }
    assert_eq!(a.say("state/sessions/one", "increment n").await.0["turn"], 1);

    an_agent_calls_an_agent_whose_session_another_host_owns(&nodes).await;
    an_approval_is_decided_at_another_host(&nodes).await;

    let metrics = a.metrics().await;
    crate::metrics::check_those_of_clusters(&metrics);
    a_host_is_drained_on_a_page_of_another_one(nodes).await;
}

async fn a_turn_is_followed_and_cancelled_through_other_hosts([a, b, c]: &[Node; 3]) {
    let gate = Gate::start().await;
    let (turn, owner) = b.begin("gate/sessions/held", &gate.url).await;
    assert_eq!(owner, b.number);
    let following = async {
        let response = a.request(Method::GET, &format!("{turn}/events")).send().await.unwrap();
        assert_eq!((response.status().as_u16(), nodes::answered_by(&response)), (200, b.number));
        response.text().await.unwrap()
    };
    let cancelling = async {
        gate.has(1).await;
        assert_eq!(c.ask(Method::DELETE, &turn, Value::Null).await.0, 202);
    };
    let (followed, ()) = tokio::join!(following, cancelling);
    assert!(followed.contains("event: delta") && followed.contains("\"cancelled\""), "{followed}");
    until(async || c.get(&turn).await.1["state"] == "failed").await;
    let (_, ended, owner) = a.get(&turn).await;
    assert_eq!((&ended["error"]["code"], owner), (&json!("cancelled"), b.number), "{ended}");
}

async fn an_agent_calls_an_agent_whose_session_another_host_owns([a, b, c]: &[Node; 3]) {
    let gate = Gate::start().await;
    gate.open();
    // The session in which calls of the session `far` of `relay` run.
    let (_, owner) = b.say("gate/sessions/relay~far", &gate.url).await;
    assert_eq!(owner, b.number);
    for (count, node) in [(1, a), (2, a), (3, c)] {
        let (answer, owner) = node.say("relay/sessions/far", "agent:gate/note {\"word\": \"x\"}").await;
        assert_eq!((&answer["text"], owner), (&json!(format!("\"x {count}\"")), a.number), "{answer}");
    }
    let (_, called, owner) = c.get("/v1/agents/gate/sessions/relay~far").await;
    assert_eq!((&called["turns"], owner), (&json!(4), b.number), "{called}");
}

async fn an_approval_is_decided_at_another_host([a, b, c]: &[Node; 3]) {
    let (turn, owner) = a.begin("careful/sessions/s", "agent:gate/note {\"word\": \"x\"}").await;
    assert_eq!(owner, a.number);
    let waiting = async || b.get("/v1/approvals").await.1["data"].as_array().cloned().unwrap_or_default();
    until(async || !waiting().await.is_empty()).await;
    let listed = waiting().await;
    assert_eq!((listed.len(), &listed[0]["agent"]), (1, &json!("careful")), "{listed:?}");
    let path = format!("/v1/approvals/{}", listed[0]["id"].as_str().unwrap());
    let decided = c.ok(Method::POST, &path, json!({"decision": "approve"})).await;
    assert_eq!(decided["decision"], "approve", "{decided}");
    until(async || b.get(&turn).await.1["state"] == "done").await;
    let (_, ended, owner) = c.get(&turn).await;
    assert_eq!((&ended["text"], owner), (&json!("\"x 1\""), a.number), "{ended}");
}

async fn a_host_is_drained_on_a_page_of_another_one([a, _b, c]: [Node; 3]) {
    let (url, number) = (a.url.clone(), c.number);
    if tokio::task::spawn_blocking(move || console::drains(&url, number)).await.unwrap() {
        let (status, log) = c.exited().await;
        assert_eq!(status, Some(0), "{log}");
    }
}

/// Has hosts fail at random under mixed load, for a part of `SKEP_CLUSTER_SECONDS`, and returns the report of the benchmark, in which
/// nothing is lost or doubled.
fn fail_at_random(server: &Server, hosts: u32, part: f64) -> Value {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let seconds: f64 = std::env::var("SKEP_CLUSTER_SECONDS").map_or(60.0, |seconds| seconds.parse().unwrap());
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(["bench", "cluster", "--json", "--pairs", "4", "--measure-s", "5", "--seed", "2026"]);
    command.args(["--hosts", &hosts.to_string(), "--minutes", &(seconds * part / 60.0).to_string()]);
    command.args(["--database", &server.url(), "--restart-database", &server.restart_line()]);
    let watch = epochs::Watch::start(server.url());
    let output = command.arg("--model").arg(model.path()).stdin(Stdio::null()).output().unwrap();
    let owners = watch.end();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    assert!(output.status.success(), "{report:#}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(owners.faults, Vec::<String>::new());
    assert!(owners.moves > 0, "sessions are taken over");
    assert_eq!(
        (&report["lost"], &report["doubled"], &report["violations"]),
        (&json!(0), &json!(0), &json!({}))
    );
    report
}

/// The clients of one host that is killed and started again see what those of several hosts see.
#[test]
fn one_host_that_fails_at_random_loses_and_doubles_nothing() {
    let Some(server) = Server::start() else { return };
    let report = fail_at_random(&server, 1, 0.25);
    let count = |name: &str| report[name].as_u64().unwrap();
    assert!(count("kills") >= 1 && count("restarts") >= count("kills"), "{report:#}");
    assert_eq!(count("stops") + count("partitions"), 0, "nobody would replace it: {report:#}");
    assert!(count("acknowledged") > 5 && count("reads") > 2 && count("effects") > 2, "{report:#}");
}

#[test]
fn hosts_that_fail_at_random_under_mixed_load_lose_and_double_nothing() {
    let Some(server) = Server::start() else { return };
    let report = fail_at_random(&server, 3, 1.0);
    let count = |name: &str| report[name].as_u64().unwrap();
    assert!(count("kills") >= 2 && count("stops") >= 1 && count("database_restarts") >= 1, "{report:#}");
    assert!(count("restarts") >= count("kills") + count("stops"), "{report:#}");
    assert!(count("peer_cuts") >= 1 && count("database_cuts") >= 1, "{report:#}");
    assert!(count("peer_freezes") >= 1 && count("database_freezes") >= 1, "{report:#}");
    assert!(count("acknowledged") > 100 && count("reads") > 20 && count("effects") > 20, "{report:#}");
    assert!(count("batch_items") > 2 && count("decisions") > 2, "{report:#}");
    for work in ["generate", "emit", "call", "alarm", "pay"] {
        assert!(report["acknowledged_by_work"][work].as_u64() > Some(0), "{work}: {report:#}");
    }
    for kind in ["webhook", "event", "alarm", "call", "pay", "batch"] {
        assert!(report["effects_by_kind"][kind].as_u64() > Some(0), "{kind}: {report:#}");
    }
    assert!(report["take_over_ms"]["p50"].as_f64().unwrap() > 0.0, "{report:#}");
    let throughput = report["throughput"].as_array().unwrap();
    assert_eq!(throughput.len(), 3);
    assert!(throughput.iter().all(|rate| rate["turns_per_s"].as_f64().unwrap() > 0.0), "{report:#}");
}

#[test]
fn committed_turns_are_measured_on_each_database() {
    let Some(server) = Server::start() else { return };
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let mut command = Command::new(env!("CARGO_BIN_EXE_skep"));
    command.args(["bench", "store", "--json", "--seconds", "1.5", "--sessions", "48"]);
    command.args(["--database", &server.url(), "--model"]).arg(model.path());
    let output = command.stdin(Stdio::null()).output().unwrap();
    let report: Value = serde_json::from_slice(&output.stdout).unwrap_or_default();
    assert!(output.status.success(), "{report:#}\n{}", String::from_utf8_lossy(&output.stderr));
    let rates = report["rates"].as_array().unwrap();
    let measured = |rate: &Value| {
        let (database, waits) = (rate["database"].as_str().unwrap(), rate["waits_for_disk"] == true);
        (database.to_owned(), rate["hosts"].as_u64().unwrap(), waits)
    };
    let expected = [
        ("SQLite", 1, false),
        ("SQLite", 1, true),
        ("PostgreSQL", 1, false),
        ("PostgreSQL", 2, false),
        ("PostgreSQL", 1, true),
        ("PostgreSQL", 2, true),
    ];
    let expected = expected.map(|(database, hosts, waits)| (database.to_owned(), hosts, waits));
    assert_eq!(rates.iter().map(measured).collect::<Vec<_>>(), expected);
    for rate in rates {
        assert!(rate["turns_per_s"].as_f64().unwrap() > 0.0, "{report:#}");
        let trips = rate["round_trips_per_turn"].as_f64();
        match rate["database"] == "SQLite" {
            true => assert_eq!(trips, None, "{report:#}"),
            false => assert!(trips.is_some_and(|trips| (0.01..50.0).contains(&trips)), "{report:#}"),
        }
    }
}

#[test]
fn the_benchmark_of_a_cluster_says_how_to_start_a_database() {
    let bench = ["bench", "cluster"];
    let output = Command::new(env!("CARGO_BIN_EXE_skep")).args(bench).stdin(Stdio::null()).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("docker run") && said.contains("--database postgres://"), "{said}");
}
