//! What goes into a turn and what comes out of it.

use serde_json::Value;
use skep_engine::{Timing, Usage};
use std::time::Instant;

/// A message for a session of an agent.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// Who asks. KV pages are never shared between principals.
    pub principal: String,
    pub agent: String,
    pub session: String,
    pub text: String,
    pub data: Option<Value>,
    pub origin: Origin,
    /// The turn ends by then, or earlier if its `turn_ms` says so.
    pub deadline: Option<Instant>,
    /// The same key in the same session gives the same outcome, and the turn runs once. 1 to 128 bytes.
    pub idempotency_key: Option<String>,
}

/// How a message came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Direct,
    Chat,
    Http(HttpOrigin),
}

/// The request that a route of the agent matched.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HttpOrigin {
    pub method: String,
    /// Without the query.
    pub path: String,
    pub query: Option<String>,
    pub parameters: Vec<(String, String)>,
    pub content_type: Option<String>,
}

/// Something that happened in a turn, in order. `Done` is the last one, and comes after the commit.
#[derive(Clone, Debug, PartialEq)]
pub enum RunEvent {
    Started {
        turn: u64,
    },
    Delta {
        text: String,
    },
    ToolCall {
        id: String,
        name: String,
        arguments: Value,
    },
    ToolResult {
        id: String,
        name: String,
        outcome: Result<Value, String>,
    },
    /// After each generation.
    Generation {
        usage: Usage,
        timing: Timing,
    },
    Done(Outcome),
}

/// What a turn answered.
#[derive(Clone, Debug, PartialEq)]
pub struct Outcome {
    pub text: String,
    pub data: Option<Value>,
    /// 1 for the session's first.
    pub turn: u64,
    /// Sum of the turn's generations.
    pub usage: Usage,
    /// From the start of the turn to its commit.
    pub elapsed_us: u64,
}
