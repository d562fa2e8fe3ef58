//! The whole response to a chat completion, and its choices.

use super::{Envelope, tool_call_json, usage_json};
use serde_json::{Value, json};
use skep_engine::{
    Usage,
    chat::{ChatFinish, ToolCall},
};

/// Returns a whole response with these choices.
pub(crate) fn completion(model: &str, choices: Vec<Value>, usage: &Usage) -> Value {
    let mut answer = Envelope::new("chatcmpl", "chat.completion", model).with_choices(choices);
    answer["usage"] = usage_json(usage);
    answer
}

/// Returns a whole response with one choice.
pub(crate) fn whole_answer(
    model: &str,
    text: &str,
    tool_calls: &[ToolCall],
    finish: ChatFinish,
    usage: &Usage,
) -> Value {
    completion(model, vec![choice(0, text, tool_calls, finish, Value::Null)], usage)
}

/// Returns one choice of a response.
pub(crate) fn choice(
    index: usize,
    text: &str,
    tool_calls: &[ToolCall],
    finish: ChatFinish,
    logprobs: Value,
) -> Value {
    let mut message = json!({"role": "assistant", "content": text});
    if !tool_calls.is_empty() {
        message["tool_calls"] = tool_calls.iter().map(tool_call_json).collect();
        if text.is_empty() {
            message["content"] = Value::Null;
        }
    }
    json!({"index": index, "message": message, "finish_reason": finish_reason(finish), "logprobs": logprobs})
}

/// Returns the name of the reason why a choice ended.
pub(crate) fn finish_reason(finish: ChatFinish) -> &'static str {
    match finish {
        ChatFinish::Stop => "stop",
        ChatFinish::Length => "length",
        ChatFinish::ToolCalls => "tool_calls",
    }
}
