//! Our client of MCP servers against our own server, and the list of those that are named.

use super::{fixture::Server, mcp::Running};
use crate::GatewayOptions;
use serde_json::json;
use skep_outbound::{McpBounds, McpOptions, McpServer, McpTransport};
use skep_runtime::{RuntimeOptions, ToolServer, ToolServerError};
use std::{sync::Arc, time::Duration};

fn server_at(url: &str) -> McpServer {
    let transport = McpTransport::Http { url: url.parse().unwrap(), headers: [].into() };
    let bounds = McpBounds { connect: Duration::from_secs(10), ..McpBounds::default() };
    McpServer::new("other", McpOptions { transport, tools: None, bounds })
}

#[tokio::test]
async fn a_server_over_http_is_listed_and_called_until_it_goes_away() {
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
        // The word of it is on its way; each question and answer takes turns with it.
        other.call("echo", json!({"text": "still there?"})).await.unwrap();
    }
    running.stop.send(()).unwrap();
    running.serving.await.unwrap().unwrap();
    let gone = other.call("echo", json!({"text": "hello"})).await.unwrap_err();
    assert!(matches!(&gone, ToolServerError::Unavailable(why) if why.contains("\"other\"")), "{gone:?}");
}

#[tokio::test]
async fn servers_are_listed_with_what_they_offer_or_why_they_do_not() {
    let running = Running::start(GatewayOptions::default()).await;
    let (there, away) = (server_at(&running.url), server_at("http://127.0.0.1:1/mcp"));
    let tool_servers = [
        ("away".to_owned(), Arc::new(away) as Arc<dyn ToolServer>),
        ("there".to_owned(), Arc::new(there) as Arc<dyn ToolServer>),
    ];
    let runtime = RuntimeOptions { tool_servers: tool_servers.into(), ..RuntimeOptions::default() };
    let server = Server::with_runtime(GatewayOptions::default(), runtime).await;
    let listed = server.get("/v1/mcp").await.json();
    let (away, there) = (&listed["data"][0], &listed["data"][1]);
    assert_eq!((&away["name"], &away["state"]), (&json!("away"), &json!("unavailable")));
    assert!(away["error"].as_str().unwrap().contains("does not introduce itself"), "{away}");
    assert_eq!((&there["state"], &there["error"]), (&json!("connected"), &json!(null)));
    assert_eq!(there["tools"][0]["name"], "echo");
}
