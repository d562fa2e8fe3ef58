//! The input of a turn and its results.

use crate::Json;
use serde::{Deserialize, Serialize};
use skep_engine::{Priority, Timing, Usage};
use std::time::Instant;

/// Maximum depth of agents that call each other.
pub(crate) const MAX_DEPTH: usize = 8;
/// First character of the host's internal idempotency keys.
pub(crate) const OWN_KEY: char = '\u{1}';
/// The prefix of the idempotency keys of calls, reserved for the host. The id of the calling turn and a space follow.
pub(crate) const CALL_KEY: &str = "\u{1}tool ";

/// A message for a session of an agent.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The tenant that sends the message. KV pages are never shared between tenants.
    pub principal: String,
    /// Id of the API key that sent the message, for usage reports.
    pub key: Option<String>,
    pub agent: String,
    /// The host's id of the session, which must belong to this tenant; see
    /// [`crate::Tenant::session`].
    pub session: String,
    pub text: String,
    pub data: Option<Json>,
    pub origin: Origin,
    /// Priority of the turn's generations.
    pub priority: Priority,
    /// Latest end of the turn. The agent's `turn_ms` may end it earlier.
    pub deadline: Option<Instant>,
    /// Identifies the turn within its session: a later message with the same key follows the same
    /// turn, or gets its outcome. 1 to 128 bytes without control characters.
    pub idempotency_key: Option<String>,
    /// Whether the turn continues without its caller. It is then durable as soon as
    /// [`crate::AgentHost::invoke`] returns. A turn with an idempotency key is always durable in
    /// this way; any other turn is cancelled when its handle is dropped.
    pub detached: bool,
}

impl Invocation {
    /// Returns whether the host has chosen the idempotency key. Messages under such a key differ only in their attempt number.
    pub(crate) fn has_key_of_host(&self) -> bool {
        self.idempotency_key.as_ref().is_some_and(|key| key.starts_with(OWN_KEY))
    }
}

/// The cause of a turn, which determines the agent's export that it calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    Direct,
    Chat,
    Http(HttpOrigin),
    /// A schedule is due. The data was set with the schedule; there is no text.
    Alarm(AlarmOrigin),
    /// An event that the session subscribes to. The data is the event's; there is no text.
    Event(EventOrigin),
    /// A call of one of the agent's tools. The data holds the arguments, and the outcome's data the
    /// result.
    Tool(ToolOrigin),
}

/// The schedule that caused a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlarmOrigin {
    /// Id of the schedule.
    pub id: String,
    pub name: String,
    pub due_at_ms: u64,
    /// Number of the attempt, starting at 1.
    pub attempt: u32,
    /// Number of earlier due times that passed without being handled.
    pub missed: u32,
}

/// The event that caused a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventOrigin {
    pub id: String,
    pub topic: String,
    /// The time at which the event was published.
    pub at_ms: u64,
    /// Number of the attempt, starting at 1.
    pub attempt: u32,
    /// Length of the chain of events that led to this one.
    pub hops: u32,
    /// The store's key of the delivery, which the turn's commit settles.
    pub delivery: i64,
}

/// The call of a tool that caused a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolOrigin {
    /// Name of the tool.
    pub name: String,
    /// Agents that wait for the result, each called by the one before it. Empty if a client makes
    /// the call.
    #[serde(default)]
    pub callers: Vec<String>,
    /// Length of the chain of events that led to the first caller's turn.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hops: u32,
}

/// Returns whether `hops` is 0, so that calls encode as in earlier versions, which had no hops.
fn is_zero(hops: &u32) -> bool {
    *hops == 0
}

/// The request that matched a route of the agent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpOrigin {
    pub method: String,
    /// Path without the query.
    pub path: String,
    pub query: Option<String>,
    pub parameters: Vec<(String, String)>,
    pub content_type: Option<String>,
}

/// An event of a turn. Events are ordered; `Done` is the last one and follows the commit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
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
        arguments: Json,
    },
    ToolResult {
        id: String,
        name: String,
        outcome: Result<Json, String>,
    },
    /// A call waits for a person's decision; see [`crate::AgentHost::decide`].
    ApprovalRequired {
        id: String,
        tool: String,
        arguments: Json,
        expires_at_ms: u64,
    },
    ApprovalDecided {
        id: String,
        approved: bool,
        /// The text that the agent receives instead of a result.
        reason: Option<String>,
    },
    /// A conversation continues with a different model, which has another name, or has the same
    /// name but different contents. Its tokens were recomputed from its messages.
    ModelChanged {
        conversation: String,
        from: String,
        to: String,
    },
    /// A route chose the model that answers, after asking `attempts` models.
    ModelChosen {
        model: String,
        attempts: u32,
    },
    /// The model's reasoning, which is not part of its text.
    Thinking {
        text: String,
    },
    /// An answer of another server was cut off, by a crash or by the server itself, and the same request is repeated. The
    /// text and the reasoning of the generation that were sent so far are void.
    GenerationRestarted,
    /// Sent after each generation.
    Generation {
        #[serde(with = "StoredUsage")]
        usage: Usage,
        #[serde(with = "StoredTiming")]
        timing: Timing,
    },
    Done(Outcome),
}

/// The result of a turn.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub text: String,
    pub data: Option<Json>,
    /// Number of the turn in its session, starting at 1.
    pub turn: u64,
    /// Sum over the turn's generations.
    #[serde(flatten, with = "StoredUsage")]
    pub usage: Usage,
    /// Time from the start of the turn (or from its resumption, after a restart) until it was ready
    /// to commit.
    pub elapsed_us: u64,
}

/// Stored form of a generation's usage.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Usage")]
pub(crate) struct StoredUsage {
    pub(crate) prompt_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) forced_tokens: u32,
    // Rows stored before speculative decoding existed lack the following fields.
    #[serde(default)]
    pub(crate) accepted_tokens: u32,
    #[serde(default)]
    pub(crate) rejected_tokens: u32,
    #[serde(default, rename = "taken_back_tokens")]
    pub(crate) rolled_back_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) reasoning_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) refused_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) cache_write_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) prefilled_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    pub(crate) prefill_ms: u32,
}

/// Returns whether a count is 0, so that usage without what only some models have encodes as in earlier versions.
fn is_none(count: &u32) -> bool {
    *count == 0
}

#[derive(Serialize, Deserialize)]
#[serde(remote = "Timing")]
struct StoredTiming {
    queue_us: u64,
    first_token_us: u64,
    total_us: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outcomes_decode_from_the_current_and_the_earlier_format() {
        let usage = Usage {
            prompt_tokens: 1,
            cached_tokens: 2,
            completion_tokens: 3,
            forced_tokens: 4,
            ..Usage::default()
        };
        let outcome = Outcome {
            text: "hi".into(),
            data: Some(Json::from(serde_json::Value::from(7))),
            turn: 9,
            usage,
            elapsed_us: 5,
        };
        let written = serde_json::to_string(&outcome).expect("an outcome serializes");
        assert_eq!(serde_json::from_str::<Outcome>(&written).expect("the current form"), outcome);
        let earlier = r#"{"text":"hi","data":7,"turn":9,"prompt_tokens":1,"cached_tokens":2,"completion_tokens":3,
                         "forced_tokens":4,"elapsed_us":5}"#;
        assert_eq!(serde_json::from_str::<Outcome>(earlier).expect("the earlier form"), outcome);
    }
}
