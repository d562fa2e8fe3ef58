//! Hosts of different versions: a host that is too far from one that lives does not start, and says what to do.

use super::nodes::Site;
use reqwest::Method;
use serde_json::{Value, json};
use skep_runtime::CLUSTER_PROTOCOL;
use std::process::Command;

/// Starts one more host, which must not start, and returns what it says.
async fn refused(site: &Site) -> String {
    let mut command: Command = site.command();
    command
        .args(["--listen", "127.0.0.1:0", "--cluster", "--cluster-key-file"])
        .arg(site.path("cluster.key"));
    let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success(), "{said}");
    said
}

/// Changes the database as its administrator.
fn execute(site: &Site, sql: &'static str) {
    std::thread::scope(|scope| scope.spawn(|| site.server.execute(sql)).join().unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_host_too_far_from_one_that_lives_does_not_start() {
    let Some(site) = Site::start(false).await else { return };
    let node = site.node().await;
    let listed = node.ok(Method::GET, "/v1/cluster", Value::Null).await;
    let versions = &listed["hosts"][0]["versions"];
    assert_eq!(versions["protocol"], CLUSTER_PROTOCOL, "{listed}");
    assert!(versions["schema"].as_i64() > Some(0), "{listed}");
    let lease = listed["hosts"][0]["lease_left_ms"].as_u64().unwrap();
    assert!((1..=10_000).contains(&lease), "{listed}");

    // The host becomes one of a much later version.
    execute(&site, "UPDATE hosts SET protocol = protocol + 5, version = '9.1.0'");
    let said = refused(&site).await;
    let expected = format!(
        "host {} of the cluster is skep 9.1.0 and speaks version {} of the protocol between hosts",
        node.number,
        CLUSTER_PROTOCOL + 5
    );
    assert!(said.contains(&expected) && said.contains("hint: start a newer version of skep here"), "{said}");
    execute(&site, "UPDATE hosts SET protocol = protocol - 10");
    let said = refused(&site).await;
    assert!(said.contains("hint: upgrade the cluster one version after the other"), "{said}");
    let listed = node.ok(Method::GET, "/v1/cluster", Value::Null).await;
    assert_eq!(
        listed["hosts"].as_array().map(Vec::len),
        Some(1),
        "nothing is left of a refused host: {listed}"
    );

    // One version apart is near enough.
    execute(&site, "UPDATE hosts SET protocol = protocol + 6");
    let next = site.node().await;
    let listed = next.ok(Method::GET, "/v1/cluster", Value::Null).await;
    let protocols: Vec<Value> =
        listed["hosts"].as_array().unwrap().iter().map(|host| host["versions"]["protocol"].clone()).collect();
    assert_eq!(protocols, [json!(CLUSTER_PROTOCOL + 1), json!(CLUSTER_PROTOCOL)]);
}
