//! Tools of agents and of MCP servers.

use anyhow::Result;
use reqwest::Method;
use skep_api::{AgentDetail, McpServer, McpServerList, Tool};

use super::Client;

impl Client {
    /// Returns the tools of an agent.
    pub async fn tools(&self, agent: &str) -> Result<Vec<Tool>> {
        let detail: AgentDetail = self.json(self.request(Method::GET, &["v1", "agents", agent])?).await?;
        Ok(detail.tools)
    }

    /// Returns the MCP servers that the host's skep.toml names.
    pub async fn mcp_servers(&self) -> Result<Vec<McpServer>> {
        let list: McpServerList = self.json(self.request(Method::GET, &["v1", "mcp"])?).await?;
        Ok(list.data)
    }
}
