//! A change at one host of a cluster applies at all of them, and callers without the key are refused.

use super::{
    deploy,
    nodes::{Node, Site, until},
};
use crate::harness::client;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

/// Attempts to see a change in time: the other tests of this program load the machine.
const ATTEMPTS: usize = 10;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_and_deployments_of_one_host_apply_at_all_and_strangers_are_refused() {
    let Some(site) = Site::start(true).await else { return };
    let nodes = site.nodes().await;
    deploy(&nodes).await;
    let [a, b, _] = &nodes;
    let (_, owner) = a.say("state/sessions/one", "increment n").await;
    assert_eq!(owner, a.number);

    // A host with another key cannot ask the owner of a session, and does not answer in its place.
    let other = site.key_file("other.key", &"another key than the others have ".repeat(2));
    let stranger = site.node_with(&other).await;
    let refused = async {
        let path = "/v1/agents/state/sessions/one";
        let (status, answer, _) = stranger.get(path).await;
        assert_eq!((status, &answer["error"]["code"]), (503, &json!("host_gone")), "{answer}");
        let log = stranger.log();
        assert!(log.contains("without the proof") || log.contains("another key"), "{log}");
        let (_, session, owner) = b.get(path).await;
        assert_eq!((&session["turns"], owner), (&json!(1), a.number), "{session}");
    };
    // The stranger waits for the owner to be replaced, so the rest happens meanwhile.
    tokio::join!(refused, async {
        a_revoked_key_is_refused_by_another_host(a, b).await;
        a_deployment_is_active_at_another_host(a, b).await;
        internal_routes_are_for_hosts(a).await;
    });
}

/// Returns the status with which a host answers to a key.
async fn status_of(node: &Node, key: &str) -> u16 {
    let request = client().get(format!("{}/v1/agents", node.url)).bearer_auth(key);
    request.send().await.unwrap().status().as_u16()
}

async fn a_revoked_key_is_refused_by_another_host(a: &Node, b: &Node) {
    let mut fastest = Duration::MAX;
    for _ in 0..ATTEMPTS {
        let created = a.ok(Method::POST, "/v1/keys", json!({"tenant": "acme", "role": "invoke"})).await;
        let (id, key) = (created["id"].as_str().unwrap(), created["key"].as_str().unwrap());
        until(async || status_of(b, key).await == 200).await;
        a.ok(Method::DELETE, &format!("/v1/keys/{id}"), Value::Null).await;
        let revoked = Instant::now();
        until(async || status_of(b, key).await == 401).await;
        fastest = fastest.min(revoked.elapsed());
        if fastest < Duration::from_secs(1) {
            return;
        }
    }
    panic!("a revoked key was used for {fastest:?}");
}

async fn a_deployment_is_active_at_another_host(a: &Node, b: &Node) {
    a.deploy("noop", "changing", "").await;
    b.knows(&["changing"]).await;
    assert_eq!(b.say("changing/sessions/before", "2").await.0["text"], "2");
    let mut fastest = Duration::MAX;
    for attempt in 0..ATTEMPTS {
        // One of the guests echoes, and the other one logs.
        let (guest, said) = if attempt % 2 == 0 { ("chatty", "logged") } else { ("noop", "2") };
        a.deploy(guest, "changing", "").await;
        let deployed = Instant::now();
        let session = format!("changing/sessions/after-{attempt}");
        until(async || b.say(&session, "2").await.0["text"] == said).await;
        fastest = fastest.min(deployed.elapsed());
        if fastest < Duration::from_secs(2) {
            return;
        }
    }
    panic!("the former version was active for {fastest:?}");
}

async fn internal_routes_are_for_hosts(node: &Node) {
    for path in ["invoke", "follow", "cancel", "drain"] {
        let turn = json!({"agent": "state", "session": "local/one", "turn": "t"});
        // Not even the key of an admin helps.
        let request = node.request(Method::POST, &format!("/cluster/v1/{path}")).json(&turn);
        let status = request.send().await.unwrap().status().as_u16();
        assert!(matches!(status, 401 | 404), "{path}: {status}");
        let forged = client().post(format!("{}/cluster/v1/{path}", node.url)).json(&turn);
        let forged = forged
            .header("x-skep-cluster-time", "1")
            .header("x-skep-cluster-nonce", "00000000000000000000000000000001")
            .header("x-skep-cluster-receiver", node.number)
            .header("x-skep-cluster-signature", "AAAA");
        assert_eq!(forged.send().await.unwrap().status(), 401, "{path}");
    }
    assert_eq!(node.get("/readyz").await.0, 200, "nobody has drained the host");
}

#[test]
fn a_host_without_the_key_of_a_cluster_does_not_start() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let Some(site) = runtime.block_on(Site::start(false)) else { return };
    let short = site.key_file("short.key", "too short");
    let absent = site.path("absent.key");
    for (arguments, words) in [
        (vec!["--cluster"], &["SKEP_CLUSTER_KEY", "key"][..]),
        (vec!["--cluster", "--cluster-key-file", short.to_str().unwrap()], &["32", "short.key"]),
        (vec!["--cluster", "--cluster-key-file", absent.to_str().unwrap()], &["absent.key"]),
    ] {
        let mut command = site.command();
        let output = command.args(["--listen", "127.0.0.1:0"]).args(&arguments).output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success(), "{arguments:?}");
        assert!(words.iter().all(|word| said.contains(*word)), "{arguments:?}: {said}");
    }
    // Others could not reach the host at an address that means all addresses of this machine.
    let key = site.path("cluster.key");
    let mut command = site.command();
    command.args(["--listen", "0.0.0.0:0", "--insecure", "--cluster", "--cluster-key-file"]).arg(key);
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && said.contains("url"), "{said}");
}
