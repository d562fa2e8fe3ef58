//! Tools of agents and of MCP servers, and hints about their effects.

use anyhow::Result;
use reqwest::Method;
use serde::{Deserialize, Serialize};

use super::{Client, wire::List};

/// A tool of an agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Tool {
    pub name: String,
    pub description: String,
    pub hints: ToolHints,
    pub timeout_ms: Option<u32>,
    pub retries: u32,
    pub needs_approval: bool,
}

/// Hints of a tool's author about its effects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolHints {
    pub read_only: bool,
    pub destructive: bool,
    pub idempotent: bool,
    pub open_world: bool,
}

/// An MCP server whose tools agents may be granted.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct McpServer {
    pub name: String,
    /// `connected` or `unavailable`.
    pub state: String,
    pub error: Option<String>,
    pub tools: Vec<McpTool>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct McpTool {
    pub name: String,
    pub description: String,
    #[serde(flatten)]
    pub hints: ToolHints,
}

#[derive(Deserialize)]
struct AgentDetail {
    tools: Vec<Tool>,
}

impl Client {
    /// Returns the tools of an agent.
    pub async fn tools(&self, agent: &str) -> Result<Vec<Tool>> {
        let detail: AgentDetail = self.json(self.request(Method::GET, &["v1", "agents", agent])?).await?;
        Ok(detail.tools)
    }

    /// Returns the MCP servers that the host's skep.toml names.
    pub async fn mcp_servers(&self) -> Result<Vec<McpServer>> {
        let list: List<McpServer> = self.json(self.request(Method::GET, &["v1", "mcp"])?).await?;
        Ok(list.data)
    }
}

impl ToolHints {
    /// Returns the hints as text for people; empty if there are none. A tool that changes nothing destroys nothing:
    /// MCP gives `destructive` a meaning only for tools that are not read-only.
    pub fn words(self) -> String {
        let ToolHints { read_only, destructive, idempotent, open_world } = self;
        let said = [
            (read_only, "read-only"),
            (destructive && !read_only, "destructive"),
            (idempotent, "idempotent"),
            (open_world, "open world"),
        ];
        said.iter().filter(|(is, _)| *is).map(|(_, word)| *word).collect::<Vec<_>>().join(", ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_read_only_tool_is_not_called_destructive() {
        let hints = |read_only, destructive| ToolHints { read_only, destructive, ..ToolHints::default() };
        assert_eq!(hints(true, true).words(), "read-only");
        assert_eq!(hints(false, true).words(), "destructive");
        assert_eq!(hints(false, false).words(), "");
    }
}
