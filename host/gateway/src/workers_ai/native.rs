//! Workers AI's native response schema: the text under `response`, and calls with their arguments as JSON.

use super::failure::described;
use crate::{
    ApiError,
    openai::usage,
    sse::{Message, Step, Writer},
};
use serde_json::Value;
use skep_api::{AiAnswer, AiChunk, AiToolCall};
use skep_engine::{
    EngineError, Usage,
    chat::{ChatEvent, ToolCall},
};

/// Returns a whole answer. With `is_json`, JSON was requested and the text is returned as a JSON value.
pub(crate) fn result(text: &str, calls: &[ToolCall], tokens: &Usage, is_json: bool) -> AiAnswer {
    let response = match is_json && calls.is_empty() {
        true => serde_json::from_str(text).unwrap_or_else(|_| Value::from(text)),
        false => Value::from(text),
    };
    AiAnswer { response, tool_calls: calls.iter().map(tool_call).collect(), usage: usage(tokens), data: None }
}

fn tool_call(call: &ToolCall) -> AiToolCall {
    let arguments = serde_json::from_str(&call.arguments);
    let arguments: Value = arguments.unwrap_or_else(|_| Value::from(call.arguments.as_str()));
    AiToolCall { id: call.id.clone(), name: call.name.clone(), arguments }
}

/// Writes a streamed answer: `{"response": …}` for each text delta, and the calls and the usage at the end.
pub(crate) struct NativeWriter;

impl Writer for NativeWriter {
    type Item = Result<ChatEvent, EngineError>;

    fn write(&mut self, event: Self::Item) -> Step {
        match event {
            Ok(ChatEvent::Text { delta, .. }) => go(AiChunk { response: Some(delta), ..AiChunk::default() }),
            Ok(ChatEvent::Finished(outcome)) if outcome.cut_off => broken(EngineError::Truncated),
            Ok(ChatEvent::Finished(outcome)) => go(AiChunk {
                response: Some(String::new()),
                tool_calls: outcome.tool_calls.iter().map(tool_call).collect(),
                usage: Some(usage(&outcome.usage)),
                ..AiChunk::default()
            }),
            Ok(_) => Step::Go(Vec::new()),
            Err(error) => broken(error),
        }
    }

    fn end(&mut self) -> Vec<Message> {
        vec![Message::done()]
    }
}

fn go(chunk: AiChunk) -> Step {
    Step::Go(vec![Message::data(&chunk)])
}

fn broken(error: EngineError) -> Step {
    let errors = vec![described(&ApiError::from(error))];
    Step::Break(vec![Message::data(&AiChunk { success: Some(false), errors, ..AiChunk::default() })])
}
