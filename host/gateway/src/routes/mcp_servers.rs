//! `/v1/mcp`: the MCP servers whose tools agents may be granted, and the tools that they currently offer.

use super::agents::hints;
use crate::Gateway;
use axum::{Json, extract::State};
use futures::future::join_all;
use skep_api::{McpServer, McpServerList, McpState, McpTool, marker};
use skep_runtime::{ServedTool, ToolServer};

/// Lists the MCP servers and the tools that they offer now.
///
/// All servers are queried at once; each responds or fails within its bounds.
#[utoipa::path(get, path = "/v1/mcp", tag = "mcp", operation_id = "list_mcp_servers", responses(
    (status = 200, description = "All servers.", body = McpServerList),
))]
pub(crate) async fn list(State(gateway): State<Gateway>) -> Json<McpServerList> {
    let servers = gateway.host.tool_servers();
    let servers = join_all(servers.iter().map(|(name, server)| described(name, server.as_ref()))).await;
    Json(McpServerList::new(servers))
}

async fn described(name: &str, server: &dyn ToolServer) -> McpServer {
    let (state, error, tools) = match server.tools().await {
        Ok(tools) => (McpState::Connected, None, tools.iter().map(tool).collect()),
        Err(error) => (McpState::Unavailable, Some(error.to_string()), Vec::new()),
    };
    McpServer { object: marker::McpServer, name: name.to_owned(), state, error, tools }
}

fn tool(tool: &ServedTool) -> McpTool {
    McpTool { name: tool.name.clone(), description: tool.description.clone(), hints: hints(tool.hints) }
}
