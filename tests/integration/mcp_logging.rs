//! Log lines of an agent's tools at a client of the Model Context Protocol, which says how severe they have to be.

// The protocol's next revision deprecates log messages, without a successor for the revisions in use.
#![allow(deprecated)]

use crate::{
    harness::{client as http_client, shared},
    mcp_conformance::deploy,
};
use rmcp::{
    ClientHandler, RoleClient, ServiceExt,
    model::{
        CallToolRequestParams, ClientCapabilities, ClientConfig, Implementation, LoggingLevel,
        LoggingMessageNotificationParam, SetLevelRequestParams,
    },
    service::NotificationContext,
    transport::{StreamableHttpClientTransport, streamable_http_client::StreamableHttpClientTransportConfig},
};
use serde_json::Value;
use std::time::Duration;
use tokio::sync::mpsc;

/// A client that keeps the log lines that it gets.
struct Listener(mpsc::UnboundedSender<(LoggingLevel, Value)>);

impl ClientHandler for Listener {
    fn get_info(&self) -> ClientConfig {
        ClientConfig::new(ClientCapabilities::default(), Implementation::new("test", "1"))
    }

    async fn on_logging_message(
        &self,
        line: LoggingMessageNotificationParam,
        _context: NotificationContext<RoleClient>,
    ) {
        let _ = self.0.send((line.level, line.data));
    }
}

#[tokio::test]
async fn a_client_gets_the_log_lines_of_the_level_that_it_sets() {
    let host = shared();
    deploy(host, "mcp_conformance", "mcp-logs", "").await;
    let (send, mut logged) = mpsc::unbounded_channel();
    let config = StreamableHttpClientTransportConfig::with_uri(host.at("/mcp/mcp-logs"));
    let transport = StreamableHttpClientTransport::with_client(http_client(), config);
    let client = Listener(send).serve(transport).await.expect("the host supports MCP");
    // The tool logs three lines of the level `info`. The lines of a call that is not filtered come after all of one before it,
    // so a line that the filter let through would be among them.
    for level in [LoggingLevel::Warning, LoggingLevel::Info, LoggingLevel::Error, LoggingLevel::Debug] {
        client.set_level(SetLevelRequestParams::new(level)).await.unwrap();
        let call = CallToolRequestParams::new("test_tool_with_logging").with_arguments(Default::default());
        client.call_tool(call).await.unwrap();
        if matches!(level, LoggingLevel::Info | LoggingLevel::Debug) {
            for _ in 0..3 {
                let line = tokio::time::timeout(Duration::from_secs(20), logged.recv()).await;
                let (level, data) = line.expect("a line").unwrap();
                assert!(level == LoggingLevel::Info && data.as_str().unwrap().starts_with("Tool "), "{data}");
            }
        }
    }
    assert!(logged.try_recv().is_err(), "lines below the level are not sent");
}
