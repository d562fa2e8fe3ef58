//! The reference clients of the Model Context Protocol, with an agent that uses all of it.

use super::{check, node, python, script};
use crate::{
    config_host::Up,
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
    let Some(mut python) = tokio::task::block_in_place(python) else { return };
    let (_up, url) = start().await;
    tokio::task::block_in_place(|| check(python.arg(script("mcp_python.py")).arg(url)));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_reference_client_for_typescript_works() {
    let Some(mut node) = tokio::task::block_in_place(|| node("mcp_node.mjs")) else { return };
    let (_up, url) = start().await;
    tokio::task::block_in_place(|| check(node.arg(url)));
}
