//! Tools: Rust functions that the model can call.
//!
//! `#[tool]` turns a function into a [`Tool`] behind the trait [`ToolFunction`]. This file knows nothing of
//! the model.

use serde_json::Value;

use crate::example::{Example, ToolExample};
use crate::host::Task;
use crate::{Context, ToolError, ToolHints};

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
    /// Number of times a failed call is retried.
    pub retries: u32,
    /// Whether a person has to approve each call.
    pub needs_approval: bool,
    /// Examples that the author gives to the model.
    pub examples: Vec<ToolExample>,
}

/// A tool function with its types erased. `#[tool]` creates it.
#[doc(hidden)]
#[derive(Clone, Copy)]
pub struct Tool {
    pub name: &'static str,
    pub description: &'static str,
    pub input_schema: fn() -> Value,
    pub output_schema: fn() -> Value,
    pub hints: ToolHints,
    pub timeout_ms: Option<u32>,
    pub retries: u32,
    pub needs_approval: bool,
    pub examples: &'static [Example],
    pub call: for<'a> fn(&'a Context, Value) -> Task<'a, Result<Value, ToolError>>,
}

impl Tool {
    pub fn definition(&self) -> ToolDefinition {
        ToolDefinition {
            name: self.name.to_owned(),
            description: self.description.to_owned(),
            input_schema: (self.input_schema)(),
            output_schema: (self.output_schema)(),
            hints: self.hints,
            timeout_ms: self.timeout_ms,
            retries: self.retries,
            needs_approval: self.needs_approval,
            examples: self.examples.iter().map(Example::parsed).collect(),
        }
    }
}

/// Implemented by `#[tool]` for a type with the function's name, so that `tools = [path::to::function]` finds
/// it.
#[doc(hidden)]
#[diagnostic::on_unimplemented(message = "`{Self}` is not a tool", label = "put `#[tool]` on this function")]
pub trait ToolFunction {
    const TOOL: Tool;
}
