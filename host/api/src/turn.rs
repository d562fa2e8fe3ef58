//! Turns and their states.

use crate::{Usage, marker};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// The whole answer of a turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct Turn<J = Value> {
    pub text: String,
    /// The agent's data, exactly as it was written.
    #[schema(value_type = Value, required)]
    pub data: Option<J>,
    pub session: String,
    /// Number of the turn in its session, starting at 1.
    pub turn: u64,
    pub turn_id: String,
    #[schema(value_type = Vec<ToolCall>)]
    pub tool_calls: Vec<ToolCall<J>>,
    /// Sum over the turn's generations.
    pub usage: Usage,
    pub timing: TurnTiming,
}

/// A call of a tool with its outcome: `result` or `error`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct ToolCall<J = Value> {
    pub id: String,
    pub name: String,
    #[schema(value_type = Value)]
    pub arguments: J,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Value, required = false)]
    pub result: Option<J>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<String>,
}

/// Times of a whole turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TurnTiming {
    /// Time until the first token of the first generation; `null` if nothing was generated.
    #[schema(required)]
    pub first_token_ms: Option<f64>,
    pub total_ms: f64,
}

/// A message that was accepted; its turn does not end with the client.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AcceptedTurn {
    #[schema(inline)]
    pub object: marker::Turn,
    pub turn_id: String,
    pub session: String,
    #[schema(inline)]
    pub state: marker::Accepted,
    /// Path of the turn.
    pub url: String,
    /// Path of the turn's events.
    pub events_url: String,
}

/// A turn, open or ended.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct TurnStatus<J = Value> {
    #[schema(inline)]
    pub object: marker::Turn,
    pub turn_id: String,
    pub session: String,
    pub accepted_at_ms: u64,
    /// The message of the turn.
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = TurnMessage, required = false)]
    pub message: Option<TurnMessage<J>>,
    #[serde(flatten)]
    #[schema(value_type = TurnState)]
    pub state: TurnState<J>,
}

/// The message of a turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct TurnMessage<J = Value> {
    /// Empty for turns that a schedule or an event began.
    pub text: String,
    /// The data of the message, exactly as it was sent.
    #[schema(value_type = Value, required)]
    pub data: Option<J>,
}

/// State of a turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "state", rename_all = "lowercase")]
pub enum TurnState<J = Value> {
    /// The turn waits for other turns of its session.
    Waiting,
    Running {
        turn: u64,
    },
    Done {
        turn: u64,
        ended_at_ms: u64,
        text: String,
        #[schema(value_type = Value, required)]
        data: Option<J>,
        usage: Usage,
        timing: TotalTime,
    },
    Failed {
        ended_at_ms: u64,
        error: TurnError,
    },
}

/// The duration of a turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TotalTime {
    pub total_ms: f64,
}

/// The reason why a turn failed.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TurnError {
    pub code: String,
    pub message: String,
}

/// Returns the default of an optional value, whatever its type.
pub(crate) fn none<J>() -> Option<J> {
    None
}
