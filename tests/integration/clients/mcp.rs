//! The reference clients of the Model Context Protocol, with an agent that uses all of it.

use super::{NO_NODE, check, node, python, script};
use crate::{
    config_host::Up,
    harness::skipped,
    mcp_conformance::{HOST, OFFER, deploy},
};

/// Starts a host with the agent.
async fn start() -> (Up, String) {
    let up = Up::start(HOST);
    deploy(&up.host, "mcp_conformance", "conformance", OFFER).await;
    let url = up.host.at("/mcp/conformance");
    (up, url)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reference_client_for_python_works() {
    let (_up, url) = start().await;
    let checked = move || check(python().arg(script("mcp_python.py")).arg(url));
    tokio::task::spawn_blocking(checked).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reference_client_for_typescript_works() {
    let (_up, url) = start().await;
    let checked = move || match node("mcp_node.mjs") {
        Some(mut node) => check(node.arg(url)),
        None => skipped(NO_NODE),
    };
    tokio::task::spawn_blocking(checked).await.unwrap();
}
