//! The host's JSON as a client sees it. Fields that this crate does not use are left out.

use serde::{Deserialize, Serialize};
use serde_json::Value;

#[derive(Debug, Deserialize)]
pub struct List<T> {
    pub data: Vec<T>,
}

#[derive(Debug, Deserialize)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ErrorDetail {
    pub message: String,
    #[serde(default)]
    pub code: String,
}

/// The agents of a host.
#[derive(Debug, Deserialize)]
pub struct Agents {
    #[serde(rename = "data")]
    pub ready: Vec<Agent>,
    #[serde(rename = "failed", default)]
    pub broken: Vec<BrokenAgent>,
}

/// An agent that the host could not start again.
#[derive(Debug, Deserialize)]
pub struct BrokenAgent {
    pub name: String,
    pub reason: String,
}

/// A deployed agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Agent {
    pub name: String,
    pub version: u64,
    pub description: String,
    pub digest: String,
    pub model: String,
    pub deployed_at_ms: u64,
    pub tools: Vec<String>,
    pub routes: Vec<String>,
    /// Likely mistakes in its manifest, which only a deployment reports.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A version of an agent.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AgentVersion {
    pub version: u64,
    pub in_force: bool,
    pub digest: String,
    pub deployed_at_ms: u64,
    pub deployed_by: String,
    pub manifest: String,
}

/// A line that an agent logged.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct LogLine {
    pub id: i64,
    pub agent: String,
    /// Empty, with turn 0, for lines that were logged outside a turn.
    pub session: String,
    pub turn: u64,
    pub at_ms: u64,
    pub level: String,
    pub message: String,
}

/// The whole answer of a turn.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Turn {
    pub text: String,
    pub data: Option<Value>,
    pub session: String,
    pub turn: u64,
    pub turn_id: String,
    pub tool_calls: Vec<ToolCall>,
    pub usage: Usage,
    pub timing: TurnTiming,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    #[serde(default)]
    pub arguments: Value,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub result: Option<Value>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct Usage {
    pub prompt_tokens: u64,
    pub completion_tokens: u64,
    pub total_tokens: u64,
    #[serde(default)]
    pub prompt_tokens_details: PromptTokens,
    #[serde(default)]
    pub completion_tokens_details: CompletionTokens,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub struct PromptTokens {
    pub cached_tokens: u64,
}

/// Draft tokens, as counted by a server that speculates.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(default)]
pub struct CompletionTokens {
    pub accepted_prediction_tokens: u64,
    pub rejected_prediction_tokens: u64,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct TurnTiming {
    pub first_token_ms: Option<f64>,
    pub total_ms: f64,
}

/// Times of one generation.
#[derive(Debug, Clone, Deserialize)]
pub struct Timing {
    pub queue_ms: f64,
    pub first_token_ms: f64,
    pub total_ms: f64,
}

/// A message that was accepted; its turn does not end with the client.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct AcceptedTurn {
    pub turn_id: String,
    pub session: String,
    pub url: String,
    pub events_url: String,
}

/// State of a turn.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum TurnState {
    Waiting,
    Running { turn: u64 },
    Done { turn: u64, text: String },
    Failed { error: ErrorDetail },
}

/// Event of a turn.
#[derive(Debug, Clone)]
pub enum TurnEvent {
    Started { turn_id: String },
    Delta(String),
    ToolCall(ToolCall),
    ToolResult(ToolCall),
    ModelChanged { conversation: String, from: String, to: String },
    Generation { usage: Usage, timing: Timing },
    Done(Turn),
}
