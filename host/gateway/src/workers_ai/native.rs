//! Workers AI's native response schema: the text under `response`, and calls with their arguments as JSON.

use super::failure::error_json;
use crate::{
    ApiError,
    openai::usage_json,
    sse::{Message, Step, Writer},
};
use serde_json::{Value, json};
use skep_engine::{
    EngineError, Usage,
    chat::{ChatEvent, ToolCall},
};

/// Returns a whole answer. With `is_json`, JSON was requested and the text is returned as a JSON value.
pub(crate) fn result(text: &str, calls: &[ToolCall], usage: &Usage, is_json: bool) -> Value {
    let response = match is_json && calls.is_empty() {
        true => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
        false => Value::from(text),
    };
    let mut result = json!({"response": response});
    if !calls.is_empty() {
        result["tool_calls"] = calls.iter().map(call_json).collect();
    }
    result["usage"] = usage_json(usage);
    result
}

fn call_json(call: &ToolCall) -> Value {
    let arguments = serde_json::from_str(&call.arguments);
    let arguments: Value = arguments.unwrap_or_else(|_| Value::from(call.arguments.as_str()));
    json!({"id": call.id, "name": call.name, "arguments": arguments})
}

/// Writes a streamed answer: `{"response": …}` for each text delta, and the calls and the usage at the end.
pub(crate) struct NativeWriter;

impl Writer for NativeWriter {
    type Item = Result<ChatEvent, EngineError>;

    fn write(&mut self, event: Self::Item) -> Step {
        match event {
            Ok(ChatEvent::Text { delta, .. }) => Step::Go(vec![Message::data(&json!({"response": delta}))]),
            Ok(ChatEvent::Finished(outcome)) if outcome.cut_off => broken(EngineError::Truncated),
            Ok(ChatEvent::Finished(outcome)) => {
                Step::Go(vec![Message::data(&result("", &outcome.tool_calls, &outcome.usage, false))])
            }
            Ok(_) => Step::Go(Vec::new()),
            Err(error) => broken(error),
        }
    }

    fn end(&mut self) -> Vec<Message> {
        vec![Message::done()]
    }
}

fn broken(error: EngineError) -> Step {
    let error = error_json(&ApiError::from(error));
    Step::Break(vec![Message::data(&json!({"success": false, "errors": [error]}))])
}
