//! Events of a turn's stream.

use crate::{Decision, ErrorBody, ToolCall, Turn, Usage, page::with_own, turn::none, words::one_of};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use utoipa::{
    PartialSchema, ToSchema,
    openapi::{
        Ref, RefOr, Schema,
        schema::{ObjectBuilder, OneOfBuilder},
    },
};

/// Defines the events with their names, which are written and read in one place.
macro_rules! events {
    ($($variant:ident($data:ty) = $name:literal,)+) => {
        /// An event of a turn: its name, and its data, which is one line of JSON in the stream. `done` or `error` is the last one.
        #[derive(Debug, Clone, Serialize, Deserialize)]
        #[serde(tag = "event", content = "data")]
        pub enum TurnEvent<J = Value> {
            $(#[serde(rename = $name)] $variant($data),)+
        }

        impl<J: Serialize> TurnEvent<J> {
            /// Returns the name of the event and its data as JSON text.
            pub fn parts(&self) -> (&'static str, String) {
                match self {
                    $(TurnEvent::$variant(data) => ($name, text(data)),)+
                }
            }
        }

        impl<J: DeserializeOwned> TurnEvent<J> {
            /// Reads an event from its name and its data. Returns `None` for an event that this version does not know.
            pub fn from_parts(name: &str, data: &str) -> Result<Option<Self>, serde_json::Error> {
                match name {
                    $($name => serde_json::from_str(data).map(|data| Some(TurnEvent::$variant(data))),)+
                    _ => Ok(None),
                }
            }
        }

        impl PartialSchema for TurnEvent {
            fn schema() -> RefOr<Schema> {
                type J = Value;
                let events = OneOfBuilder::new()$(.item(named::<$data>($name)))+;
                let about = "An event of a turn: its name, and its data, which is one line of JSON in the stream. \
                             `done` or `error` is the last one.";
                RefOr::T(Schema::OneOf(events.description(Some(about)).build()))
            }
        }

        impl ToSchema for TurnEvent {
            fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
                type J = Value;
                $(with_own(schemas, <$data>::name(), <$data>::schema(), <$data>::schemas);)+
            }
        }
    };
}

events! {
    Turn(TurnStarted) = "turn",
    Delta(Delta) = "delta",
    ToolCall(ToolCall<J>) = "tool_call",
    ToolResult(ToolResult<J>) = "tool_result",
    ApprovalRequired(ApprovalRequired<J>) = "approval_required",
    ApprovalDecided(ApprovalDecided) = "approval_decided",
    ModelChanged(ModelChanged) = "model_changed",
    ModelChosen(ModelChosen) = "model_chosen",
    Thinking(Thinking) = "thinking",
    GenerationRestarted(GenerationRestarted) = "generation_restarted",
    Usage(Generation) = "usage",
    Done(Turn<J>) = "done",
    Error(ErrorBody) = "error",
}

/// Returns the schema of an event with this name and data of this type.
fn named<T: ToSchema>(name: &str) -> ObjectBuilder {
    let event = ObjectBuilder::new()
        .property("event", one_of(&[name], None))
        .property("data", Ref::from_schema_name(T::name()));
    event.required("event").required("data")
}

/// The turn has started.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TurnStarted {
    /// Number of the turn in its session, starting at 1.
    pub turn: u64,
    pub turn_id: String,
}

/// A piece of generated text.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Delta {
    pub text: String,
}

/// The outcome of a call: `result` or `error`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct ToolResult<J = Value> {
    pub id: String,
    pub name: String,
    #[serde(default = "none", skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Value, required = false)]
    pub result: Option<J>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<String>,
}

/// A call that waits for a person's decision.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct ApprovalRequired<J = Value> {
    pub id: String,
    pub tool: String,
    #[schema(value_type = Value)]
    pub arguments: J,
    pub expires_at_ms: u64,
}

/// A decision about a call.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ApprovalDecided {
    pub id: String,
    pub decision: Decision,
    #[schema(required)]
    pub reason: Option<String>,
}

/// The conversation continues with another model.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelChanged {
    pub conversation: String,
    pub from: String,
    pub to: String,
}

/// A route chose the model that answers.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelChosen {
    pub model: String,
    /// Number of models that were asked, this one included.
    pub attempts: u32,
}

/// A piece of the model's reasoning, which is not part of its text.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Thinking {
    pub text: String,
}

/// The answer of another server was cut off, by the server itself or by a crash of the host, and the request is
/// repeated: the text and the reasoning that the generation had sent so far are void.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct GenerationRestarted {}

/// The figures of one generation of the turn.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Generation {
    pub usage: Usage,
    pub timing: Timing,
}

/// Times of one generation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Timing {
    pub queue_ms: f64,
    pub first_token_ms: f64,
    pub total_ms: f64,
}

fn text(data: &impl Serialize) -> String {
    serde_json::to_string(data).expect("strings, numbers and JSON always serialize")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_event_is_read_from_the_name_and_the_data_that_it_is_written_as() {
        let usage = json!({
            "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 1},
            "completion_tokens_details": {"reasoning_tokens": 0, "accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0},
        });
        let call = json!({"id": "c", "name": "t", "arguments": {"a": 1}, "result": [2]});
        let done = json!({
            "text": "x", "data": null, "session": "s", "turn": 1, "turn_id": "t", "tool_calls": [call], "usage": usage,
            "timing": {"first_token_ms": null, "total_ms": 1.5},
        });
        for (name, data) in [
            ("turn", json!({"turn": 1, "turn_id": "t"})),
            ("delta", json!({"text": "x"})),
            ("tool_call", json!({"id": "c", "name": "t", "arguments": {}})),
            ("tool_result", json!({"id": "c", "name": "t", "error": "no"})),
            ("approval_required", json!({"id": "c", "tool": "t", "arguments": 1, "expires_at_ms": 2})),
            ("approval_decided", json!({"id": "c", "decision": "deny", "reason": null})),
            ("model_changed", json!({"conversation": "main", "from": "a", "to": "b"})),
            ("model_chosen", json!({"model": "a/b", "attempts": 2})),
            ("thinking", json!({"text": "hm"})),
            ("generation_restarted", json!({})),
            (
                "usage",
                json!({"usage": usage, "timing": {"queue_ms": 0.5, "first_token_ms": 1.0, "total_ms": 2.0}}),
            ),
            ("done", done),
            ("error", json!({"error": {"message": "m", "type": "t", "param": null, "code": "c"}})),
        ] {
            let event = TurnEvent::<Value>::from_parts(name, &data.to_string()).unwrap().expect(name);
            assert_eq!(event.parts(), (name, data.to_string()));
            assert_eq!(serde_json::to_value(&event).unwrap(), json!({"event": name, "data": data}));
        }
    }

    #[test]
    fn events_and_fields_of_a_newer_host_are_ignored() {
        assert!(TurnEvent::<Value>::from_parts("something_new", "{}").unwrap().is_none());
        let event = TurnEvent::<Value>::from_parts("delta", "{\"text\":\"x\",\"new\":1}").unwrap();
        assert!(matches!(event, Some(TurnEvent::Delta(Delta { text })) if text == "x"));
    }
}
