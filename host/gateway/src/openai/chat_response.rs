//! The whole response to a chat completion, and its choices.

use super::{Envelope, logprobs, tool_call};
use skep_api::{AssistantMessage, ChatChoice, ChatCompletion, ChatLogprobs, marker};
use skep_engine::{
    Usage,
    chat::{ChatFinish, ToolCall},
};
use skep_runtime::{BatchAnswer, ScoredToken};

/// Returns a whole response with these choices.
pub(crate) fn completion(model: &str, choices: Vec<ChatChoice>, usage: &Usage) -> ChatCompletion {
    Envelope::new("chatcmpl", model).chat(choices, usage)
}

/// Returns a whole response for a stored answer.
pub(crate) fn whole_answer(envelope: &Envelope, answer: &BatchAnswer) -> ChatCompletion {
    let choices = answer.choices().enumerate().map(|(index, answer)| {
        let BatchAnswer { text, reasoning, tool_calls, finish, scores, .. } = answer;
        let content = |scores: &Vec<ScoredToken>| scores.iter().map(logprobs::chat_entry).collect();
        let logprobs = scores.as_ref().map(|scores| ChatLogprobs { content: content(scores) });
        choice(index, message(text, reasoning, tool_calls), *finish, logprobs)
    });
    envelope.chat(choices.collect(), &answer.total_usage())
}

/// Returns the message of a choice.
pub(crate) fn message(text: &str, reasoning: &str, tool_calls: &[ToolCall]) -> AssistantMessage {
    let reasoning = Some(reasoning).filter(|text| !text.is_empty()).map(str::to_owned);
    let is_only_calls = text.is_empty() && !tool_calls.is_empty();
    AssistantMessage {
        role: marker::Assistant,
        content: (!is_only_calls).then(|| text.to_owned()),
        reasoning_content: reasoning.clone(),
        reasoning,
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
