//! A server whose tools agents call as `mcp:SERVER/TOOL`: what the runtime needs to know of one.
//!
//! To plug one in, implement [`ToolServer`] and put it under its name into `RuntimeOptions::tool_servers`. The runtime asks
//! it for its tools whenever an agent lists or calls them, so an implementation keeps the list and learns of changes by
//! itself. Grants, schemas of arguments and results, deadlines, the journal, spans and metrics are the runtime's; dropping
//! the future of a call cancels it.

use futures::future::BoxFuture;
use serde_json::Value;
use std::{fmt::Debug, sync::Arc};

/// A server of tools, connected or not.
pub trait ToolServer: Debug + Send + Sync + 'static {
    /// All tools that it offers now.
    fn tools(&self) -> BoxFuture<'_, Result<Arc<[ServedTool]>, ToolServerError>>;

    /// Calls a tool. The arguments are an object that validates against its input schema.
    fn call<'a>(&'a self, tool: &'a str, arguments: Value) -> BoxFuture<'a, Result<Value, ToolServerError>>;
}

/// A tool as its server describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedTool {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// JSON Schema of the result, if it has one.
    pub output_schema: Option<Value>,
    pub hints: ToolHints,
}

/// What a tool does to the world, as its author says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ToolHints {
    /// It changes nothing.
    pub read_only: bool,
    /// What it changes may be lost by that.
    pub destructive: bool,
    /// Called again with the same arguments it changes nothing more.
    pub idempotent: bool,
    /// It reaches beyond what the agent and its host keep.
    pub open_world: bool,
}

/// Why a server gave no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolServerError {
    /// The tool said so, in words for the model.
    #[error("{0}")]
    Failed(String),
    /// The server cannot be reached or does not answer as it should. Nothing was done, as far as is known.
    #[error("{0}")]
    Unavailable(String),
}

impl ToolHints {
    /// Whether a call that was cut off may be made again.
    pub fn may_repeat(self) -> bool {
        self.read_only || self.idempotent
    }
}
