//! What goes into a turn and what comes out of it.

use crate::Json;
use serde::{Deserialize, Serialize};
use skep_engine::{Priority, Timing, Usage};
use std::time::Instant;

/// A message for a session of an agent.
#[derive(Clone, Debug)]
pub struct Invocation {
    /// The tenant that asks. KV pages are never shared between tenants.
    pub principal: String,
    pub agent: String,
    /// The host's id of the session, which must be one of this tenant's; see [`crate::Tenant::session`].
    pub session: String,
    pub text: String,
    pub data: Option<Json>,
    pub origin: Origin,
    /// Of its generations.
    pub priority: Priority,
    /// The turn ends by then, or earlier if its `turn_ms` says so.
    pub deadline: Option<Instant>,
    /// The same key in the same session is the same turn: who comes later follows it, or gets its outcome. 1 to 128
    /// bytes without control characters.
    pub idempotency_key: Option<String>,
    /// The turn is durable as soon as [`crate::AgentHost::invoke`] has answered, and goes on without its caller. So does
    /// one with an idempotency key. Any other is cancelled when its handle is dropped.
    pub detached: bool,
}

/// How a turn came about, and so which of the agent's exports it calls.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Origin {
    Direct,
    Chat,
    Http(HttpOrigin),
    /// A schedule is due. The data is what was set with it; there is no text.
    Alarm(AlarmOrigin),
    /// An event that the session takes. The data is the event's; there is no text.
    Event(EventOrigin),
    /// Somebody calls one of the agent's tools. The data is the arguments, and the outcome's data the result.
    Tool(ToolOrigin),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AlarmOrigin {
    /// Of the schedule.
    pub id: String,
    pub name: String,
    pub due_at_ms: u64,
    /// 1 for the first try.
    pub attempt: u32,
    /// Earlier times of the schedule that passed while nobody was there.
    pub missed: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventOrigin {
    pub id: String,
    pub topic: String,
    pub at_ms: u64,
    /// 1 for the first try.
    pub attempt: u32,
    /// How many events led to it, one after the other.
    pub hops: u32,
    /// How the store knows the delivery, which the turn's commit settles.
    pub delivery: i64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolOrigin {
    pub name: String,
    /// Agents that wait for the result, each called by the one before it. Nobody, if a client calls.
    #[serde(default)]
    pub callers: Vec<String>,
    /// How many events led to the first caller's turn, one after the other.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hops: u32,
}

/// What earlier versions wrote has no hops, and is still the same call.
fn is_zero(hops: &u32) -> bool {
    *hops == 0
}

/// The request that a route of the agent matched.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HttpOrigin {
    pub method: String,
    /// Without the query.
    pub path: String,
    pub query: Option<String>,
    pub parameters: Vec<(String, String)>,
    pub content_type: Option<String>,
}

/// Something that happened in a turn, in order. `Done` is the last one, and comes after the commit.
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
    /// A call waits for a person's word; see [`crate::AgentHost::decide`].
    ApprovalRequired {
        id: String,
        tool: String,
        arguments: Json,
        expires_at_ms: u64,
    },
    ApprovalDecided {
        id: String,
        approved: bool,
        /// What the agent is told instead of a result.
        reason: Option<String>,
    },
    /// A conversation goes on with another model than it was with: one of another name or, under the same name, another one.
    /// Its tokens were made anew from its messages.
    ModelChanged {
        conversation: String,
        from: String,
        to: String,
    },
    /// After each generation.
    Generation {
        #[serde(with = "StoredUsage")]
        usage: Usage,
        #[serde(with = "StoredTiming")]
        timing: Timing,
    },
    Done(Outcome),
}

/// What a turn answered.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Outcome {
    pub text: String,
    pub data: Option<Json>,
    /// 1 for the session's first.
    pub turn: u64,
    /// Sum of the turn's generations.
    #[serde(flatten, with = "StoredUsage")]
    pub usage: Usage,
    /// From the start of the turn until there was something to commit; after a restart, from that.
    pub elapsed_us: u64,
}

/// How the usage of a generation is written into the store.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Usage")]
pub(crate) struct StoredUsage {
    pub(crate) prompt_tokens: u32,
    pub(crate) cached_tokens: u32,
    pub(crate) completion_tokens: u32,
    pub(crate) forced_tokens: u32,
    // What was stored before there were drafts has none of these.
    #[serde(default)]
    pub(crate) accepted_tokens: u32,
    #[serde(default)]
    pub(crate) rejected_tokens: u32,
    #[serde(default)]
    pub(crate) taken_back_tokens: u32,
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
    fn an_outcome_is_read_as_it_was_written_and_as_earlier_versions_wrote_it() {
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
        let written = serde_json::to_string(&outcome).expect("it is JSON");
        assert_eq!(serde_json::from_str::<Outcome>(&written).expect("its own text"), outcome);
        let earlier = r#"{"text":"hi","data":7,"turn":9,"prompt_tokens":1,"cached_tokens":2,"completion_tokens":3,
                         "forced_tokens":4,"elapsed_us":5}"#;
        assert_eq!(serde_json::from_str::<Outcome>(earlier).expect("an earlier text"), outcome);
    }
}
