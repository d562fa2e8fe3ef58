//! Agents and their tools.

use crate::marker;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// The agents of a host.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Agents {
    #[schema(inline)]
    pub object: marker::List,
    #[serde(rename = "data")]
    pub ready: Vec<Agent>,
    #[serde(rename = "failed", default)]
    #[schema(required)]
    pub broken: Vec<BrokenAgent>,
}

/// An agent that the host could not start again.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BrokenAgent {
    pub name: String,
    pub reason: String,
}

/// A deployed agent.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Agent {
    #[schema(inline)]
    pub object: marker::Agent,
    pub name: String,
    /// The active version.
    pub version: u64,
    pub description: String,
    /// SHA-256 of the component, in hexadecimal digits.
    pub digest: String,
    /// The model that the agent uses by default.
    pub model: String,
    pub deployed_at_ms: u64,
    /// Names of the agent's own tools.
    pub tools: Vec<String>,
    /// HTTP routes of the agent, such as `POST /hello/{session}`.
    pub routes: Vec<String>,
    /// Likely mistakes in its manifest, and hosts of the cluster on which this version is not active yet. Only the answers
    /// to a deployment and a rollback have them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A deployed agent with everything that its author specified.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AgentDetail {
    #[schema(inline)]
    pub object: marker::Agent,
    pub name: String,
    /// The active version.
    pub version: u64,
    pub description: String,
    /// SHA-256 of the component, in hexadecimal digits.
    pub digest: String,
    /// The model that the agent uses by default.
    pub model: String,
    pub deployed_at_ms: u64,
    pub tools: Vec<Tool>,
    /// HTTP routes of the agent, such as `POST /hello/{session}`.
    pub routes: Vec<String>,
    /// The text of the agent's `agent.toml`.
    pub manifest: String,
    /// The limits in effect, by name.
    #[schema(value_type = BTreeMap<String, u32>)]
    pub limits: serde_json::Map<String, Value>,
    /// How far the limits over all sessions are used on the host that answers, by the names of `limits`. Only an admin gets it, because
    /// other tenants use the same limits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub used: Option<BTreeMap<String, u64>>,
    /// The use of the limits of a turn by the latest turns. Only an admin gets it, and only after a turn has ended.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub recent_turns: Option<RecentTurns>,
}

/// The use of the latest turns of an agent, at most 20 that ended on the host that answers since it started. The amounts are by the
/// names of `limits`, in the units of these names and rounded up.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RecentTurns {
    /// Number of the turns.
    pub turns: u64,
    /// The use of the turn that ended last.
    pub latest: BTreeMap<String, u64>,
    /// The highest use of each limit.
    pub highest: BTreeMap<String, u64>,
}

/// A tool that an agent offers to its model.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Tool {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// JSON Schema of the result, if the tool has one.
    pub output_schema: Option<Value>,
    pub hints: ToolHints,
    /// Maximum duration of one call.
    pub timeout_ms: Option<u32>,
    /// Number of times that a failed call is retried.
    pub retries: u32,
    /// Whether a person decides on each call before it is made.
    pub needs_approval: bool,
}

/// Hints of a tool's author about its effects.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ToolHints {
    pub read_only: bool,
    pub destructive: bool,
    pub idempotent: bool,
    pub open_world: bool,
}

/// The form that deploys an agent.
#[derive(Debug, Clone, ToSchema)]
pub struct Deployment {
    /// The text of the `agent.toml`.
    pub manifest: String,
    /// The WebAssembly component.
    #[schema(value_type = String, format = Binary, content_media_type = "application/wasm")]
    pub component: Vec<u8>,
}

impl ToolHints {
    /// Returns the hints as text for people; empty if there are none. A tool that changes nothing destroys nothing: MCP
    /// gives `destructive` a meaning only for tools that are not read-only.
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
