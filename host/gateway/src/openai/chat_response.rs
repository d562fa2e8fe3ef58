//! The whole response to a chat completion, and its choices.

use super::{Envelope, tool_call};
use skep_api::{AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs, marker};
use skep_engine::{
    Usage,
    chat::{ChatFinish, ToolCall},
};
use skep_runtime::BatchAnswer;

/// Returns a whole response with these choices.
pub(crate) fn completion(model: &str, choices: Vec<ChatChoice>, usage: &Usage) -> ChatCompletion {
    Envelope::new("chatcmpl", model).chat(choices, usage)
}

/// Returns a whole response for a stored answer.
pub(crate) fn whole_answer(model: &str, answer: &BatchAnswer) -> ChatCompletion {
    let BatchAnswer { text, reasoning, tool_calls, finish, usage, .. } = answer;
    completion(model, vec![choice(0, message(text, reasoning, tool_calls), *finish, None)], usage)
}

/// Returns the message of a choice.
pub(crate) fn message(text: &str, reasoning: &str, tool_calls: &[ToolCall]) -> AssistantMessage {
    let is_only_calls = text.is_empty() && !tool_calls.is_empty();
    AssistantMessage {
        role: marker::Assistant,
        content: (!is_only_calls).then(|| text.to_owned()),
        reasoning_content: (!reasoning.is_empty()).then(|| reasoning.to_owned()),
        tool_calls: tool_calls.iter().map(tool_call).collect(),
    }
}

/// Returns one choice of a response.
pub(crate) fn choice(
    index: usize,
    message: AssistantMessage,
    finish: ChatFinish,
    logprobs: Option<ChatLogprobs>,
) -> ChatChoice {
    ChatChoice { index: index as u32, message, finish_reason: finish.as_str().to_owned(), logprobs }
}
