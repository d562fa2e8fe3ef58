//! Tools: Rust functions that the model can call.
//!
//! `#[tool]` turns a function into a [`Tool`] behind the trait [`ToolFunction`]. A tool takes the [`Context`], which lists
//! the tools, so both are in this module. This file knows nothing of the model.

use serde_json::Value;

use super::Context;
use crate::error::ToolError;
use crate::example::Example;
use crate::host::{Task, ToolHints};
use crate::tool::ToolDefinition;

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
    /// Returns the description of the tool that the host and the model get.
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
