//! `/v1/mcp`: the MCP servers whose tools agents may be granted, and the tools that they currently offer.

use crate::Gateway;
use axum::{Json, extract::State};
use futures::future::join_all;
use serde_json::{Value, json};
use skep_runtime::{ServedTool, ToolServer};

/// Queries all servers at once; each responds or fails within its bounds.
pub(crate) async fn list(State(gateway): State<Gateway>) -> Json<Value> {
    let servers = gateway.host.tool_servers();
    let data = join_all(servers.iter().map(|(name, server)| server_json(name, server.as_ref()))).await;
    Json(json!({"object": "list", "data": data}))
}

async fn server_json(name: &str, server: &dyn ToolServer) -> Value {
    let (state, error, tools) = match server.tools().await {
        Ok(tools) => ("connected", None, tools.iter().map(tool_json).collect()),
        Err(error) => ("unavailable", Some(error.to_string()), Vec::new()),
    };
    json!({"object": "mcp_server", "name": name, "state": state, "error": error, "tools": tools})
}

fn tool_json(tool: &ServedTool) -> Value {
    json!({
        "name": tool.name,
        "description": tool.description,
        "read_only": tool.hints.read_only,
        "destructive": tool.hints.destructive,
        "idempotent": tool.hints.idempotent,
        "open_world": tool.hints.open_world,
    })
}
