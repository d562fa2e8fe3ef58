//! The definition of a tool, as plain data.

use serde_json::Value;

use crate::example::ToolExample;
use crate::host::ToolHints;

/// The definition of a tool, as given to the model and the host.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolDefinition {
    /// The name of the function.
    pub name: String,
    /// The doc comment of the function.
    pub description: String,
    /// JSON Schema of the arguments: an object with one property for each parameter.
    pub input_schema: Value,
    /// JSON Schema of the result.
    pub output_schema: Value,
    /// Effects of the tool.
    pub hints: ToolHints,
    /// Timeout of one call, in milliseconds.
    pub timeout_ms: Option<u32>,
    /// Number of times a failed call of an agent is retried. MCP clients decide themselves whether to call again.
    pub retries: u32,
    /// Whether a person has to approve each call.
    pub needs_approval: bool,
    /// Examples that the author gives to the model.
    pub examples: Vec<ToolExample>,
}
