//! Descriptions of the tools that the host can call.

use serde_json::Value;

/// A tool that the agent was granted, as the host lists it. To call a tool whose types are known, see
/// [`HostTool`](crate::HostTool).
#[derive(Debug, Clone, PartialEq)]
pub struct HostToolInfo {
    /// The name: `agent:NAME/TOOL`, `mcp:SERVER/TOOL` or `http/fetch`.
    pub name: String,
    /// The name that the model uses; `None` if the tool's schema cannot be enforced on a model.
    pub model_name: Option<String>,
    /// The description that the tool's provider wrote.
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// JSON Schema of the result, if the tool has one.
    pub output_schema: Option<Value>,
    /// Effects of the tool.
    pub hints: ToolHints,
}

/// Effects of a tool, as declared by its author.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ToolHints {
    /// The tool changes nothing.
    pub read_only: bool,
    /// The tool may destroy what it changes.
    pub destructive: bool,
    /// Repeating a call with the same arguments has no further effect.
    pub idempotent: bool,
    /// The tool reaches beyond the agent and its host.
    pub open_world: bool,
}
