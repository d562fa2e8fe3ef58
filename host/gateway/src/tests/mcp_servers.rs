//! Tests the client for MCP servers against the gateway's own MCP server, and the list of configured servers.

use super::{fixture::Server, mcp::Running};
use crate::GatewayOptions;
use serde_json::json;
use skep_outbound::{McpBounds, McpForms, McpOptions, McpServer, McpTransport};
use skep_runtime::{RuntimeOptions, ToolServer, ToolServerError};
use std::{sync::Arc, time::Duration};

fn server_at(url: &str) -> McpServer {
    let transport = McpTransport::Http { url: url.parse().unwrap(), headers: [].into() };
    let bounds = McpBounds { connect: Duration::from_secs(10), ..McpBounds::default() };
    McpServer::new("other", McpOptions { transport, tools: None, forms: McpForms::default(), bounds })
}

#[tokio::test]
async fn a_server_over_http_can_be_listed_and_called_until_it_stops() {
    let running = Running::start(GatewayOptions::default()).await;
    let other = server_at(&running.url);
    let names = async || {
        let tools = other.tools().await.unwrap();
        tools.iter().map(|tool| tool.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(names().await, ["echo"]);
    let answer = other.call("echo", json!({"text": "hello", "session": "s"})).await.unwrap();
    assert_eq!(answer, json!({"text": "hello", "session": "s", "turn": 1}));
    let trapped = other.call("echo", json!({"text": "!"})).await.unwrap_err();
    assert!(matches!(&trapped, ToolServerError::Failed(why) if why.contains("trapped")), "{trapped:?}");

    running.deploy("new").await;
    while names().await.len() == 1 {
        // The notification is still on its way; a round trip gives it time to arrive.
        other.call("echo", json!({"text": "still there?"})).await.unwrap();
    }
    running.stop.send(()).unwrap();
    running.serving.await.unwrap().unwrap();
    let gone = other.call("echo", json!({"text": "hello"})).await.unwrap_err();
    assert!(matches!(&gone, ToolServerError::Unavailable(why) if why.contains("\"other\"")), "{gone:?}");
}

#[tokio::test]
async fn servers_are_listed_with_their_tools_or_their_error() {
    let running = Running::start(GatewayOptions::default()).await;
    let (there, away) = (server_at(&running.url), server_at("http://127.0.0.1:1/mcp"));
    let tool_servers = [
        ("away".to_owned(), Arc::new(away) as Arc<dyn ToolServer>),
        ("there".to_owned(), Arc::new(there) as Arc<dyn ToolServer>),
    ];
    let runtime = RuntimeOptions::default();
    let server = Server::with_tool_servers(GatewayOptions::default(), runtime, tool_servers.into()).await;
    let listed = server.get("/v1/mcp").await.json();
    let (away, there) = (&listed["data"][0], &listed["data"][1]);
    assert_eq!((&away["name"], &away["state"]), (&json!("away"), &json!("unavailable")));
    assert!(away["error"].as_str().unwrap().contains("the handshake failed"), "{away}");
    assert_eq!((&there["state"], &there["error"]), (&json!("connected"), &json!(null)));
    assert_eq!(there["tools"][0]["name"], "echo");
}
