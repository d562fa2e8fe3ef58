//! The interface of a server whose tools agents call as `mcp:SERVER/TOOL`.
//!
//! A server is plugged in by implementing [`ToolServer`] and adding it under its name to `HostParts::tool_servers`.
//! The runtime requests the tools whenever an agent lists or calls them, so an implementation caches the list
//! and tracks changes itself. The runtime handles grants, validation of arguments and results, deadlines, the
//! journal, spans and metrics. Dropping the future of a call cancels the call.

use futures::future::BoxFuture;
use serde_json::Value;
use std::{fmt::Debug, sync::Arc, time::Duration};

/// A server that offers tools, connected or not.
pub trait ToolServer: Debug + Send + Sync + 'static {
    /// Returns all tools that the server currently offers.
    fn tools(&self) -> BoxFuture<'_, Result<Arc<[ServedTool]>, ToolServerError>>;

    /// Calls a tool. The arguments are an object that validates against the tool's input schema.
    fn call<'a>(&'a self, tool: &'a str, arguments: Value) -> BoxFuture<'a, Result<Value, ToolServerError>>;
}

/// A tool as its server describes it.
#[derive(Clone, Debug, PartialEq)]
pub struct ServedTool {
    pub name: String,
    pub description: String,
    /// JSON Schema of the arguments.
    pub input_schema: Value,
    /// JSON Schema of the result, if the tool declares one.
    pub output_schema: Option<Value>,
    pub hints: ToolHints,
}

/// The effects of a tool, as declared by its author.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ToolHints {
    /// The tool changes nothing.
    pub read_only: bool,
    /// The changes that the tool makes may destroy data.
    pub destructive: bool,
    /// A repeated call with the same arguments has no further effect.
    pub idempotent: bool,
    /// The tool interacts with systems outside of the agent and its host.
    pub open_world: bool,
}

/// The reason why a call has no result.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ToolServerError {
    /// The tool reported a failure, with a message for the model.
    #[error("{0}")]
    Failed(String),
    /// The server cannot be reached, and the tool was not called. The same call may be repeated.
    #[error("{0}")]
    Unavailable(String),
    /// The tool was called and did not answer within this time. It is unknown whether it did its work.
    #[error("it did not answer within {} ms", .0.as_millis())]
    TimedOut(Duration),
    /// The connection was lost during the call. It is unknown whether the tool did its work.
    #[error("{0}")]
    Interrupted(String),
}

impl ToolHints {
    /// Returns whether an interrupted call may be repeated.
    pub fn may_repeat(self) -> bool {
        self.read_only || self.idempotent
    }
}
