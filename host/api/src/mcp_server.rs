//! MCP servers whose tools agents may be granted.

use crate::{ToolHints, marker, words::words};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An MCP server whose tools agents may be granted.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct McpServer {
    #[schema(inline)]
    pub object: marker::McpServer,
    pub name: String,
    pub state: McpState,
    /// The reason why the server is unavailable.
    #[schema(required)]
    pub error: Option<String>,
    /// The tools that the server offers now.
    pub tools: Vec<McpTool>,
}

/// A tool of an MCP server.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct McpTool {
    pub name: String,
    pub description: String,
    #[serde(flatten)]
    pub hints: ToolHints,
}

words! {
    /// Whether an MCP server answers.
    pub enum McpState {
        Connected = "connected",
        Unavailable = "unavailable",
    }
}
