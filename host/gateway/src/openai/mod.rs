//! OpenAI's request and response shapes: the fields of requests, and the parts that responses share.

pub(crate) mod chat_request;
pub(crate) mod chat_response;
pub(crate) mod fields;
pub(crate) mod logprobs;
pub(crate) mod parameters;
pub(crate) mod response_format;

use serde_json::{Value, json};
use skep_engine::{Usage, chat::ToolCall};
use std::time::{SystemTime, UNIX_EPOCH};

pub(crate) fn usage_json(usage: &Usage) -> Value {
    let mut value = json!({
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": u64::from(usage.prompt_tokens) + u64::from(usage.completion_tokens),
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "accepted_prediction_tokens": usage.accepted_tokens,
            "rejected_prediction_tokens": usage.rejected_tokens,
        },
    });
    // OpenAI's shape has no such count, so it is added only if it is not 0.
    if usage.rolled_back_tokens > 0 {
        value["completion_tokens_details"]["taken_back_tokens"] = usage.rolled_back_tokens.into();
    }
    value
}

pub(crate) fn tool_call_json(call: &ToolCall) -> Value {
    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
}

/// The fields that all responses to one request share.
#[derive(Clone)]
pub(crate) struct Envelope {
    id: String,
    object: &'static str,
    created_s: u64,
    model: String,
}

impl Envelope {
    pub(crate) fn new(prefix: &str, object: &'static str, model: &str) -> Self {
        let created_s = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
        let id = format!("{prefix}-{}", uuid::Uuid::now_v7().simple());
        Envelope { id, object, created_s, model: model.to_owned() }
    }

    pub(crate) fn with_choices(&self, choices: Vec<Value>) -> Value {
        json!({"id": self.id, "object": self.object, "created": self.created_s, "model": self.model, "choices": choices})
    }

    /// Returns the last chunk of a stream whose client requested the usage.
    pub(crate) fn with_usage(&self, usage: &Usage) -> Value {
        let mut value = self.with_choices(Vec::new());
        value["usage"] = usage_json(usage);
        value
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn taken_back_tokens_are_reported_only_if_there_are_some() {
        let details = |rolled_back_tokens| {
            let usage = Usage { completion_tokens: 5, rolled_back_tokens, ..Usage::default() };
            let value = usage_json(&usage);
            assert_eq!((&value["completion_tokens"], &value["total_tokens"]), (&json!(5), &json!(5)));
            value["completion_tokens_details"].get("taken_back_tokens").cloned()
        };
        assert_eq!((details(0), details(7)), (None, Some(json!(7))));
    }
}
