//! Translates messages and events of a chat for the observer of a request.

use super::answer::{ChatEvent, ChatOutcome};
use super::message::{ChatMessage, ToolCall};
use super::options::ChatOptions;
use super::stream::ChatStream;
use crate::EngineError;
use crate::observation::{Attempts, Ending, Observation, Observed, PromptMessage, ToolCallRef};

/// Starts an answer of `model`, and lets the observer of the options follow it, if there is one. The options that
/// `start` gets have none, so that a model that asks others is observed once.
pub(crate) fn observed(
    model: &str,
    said: &mut dyn Iterator<Item = PromptMessage<'_>>,
    mut options: ChatOptions,
    start: impl FnOnce(ChatOptions) -> Result<ChatStream, EngineError>,
) -> Result<ChatStream, EngineError> {
    let Some(observer) = options.observer.take() else { return start(options) };
    options.attempts = Attempts::kept();
    let mut observed = Observed::begin(&*observer, model, said, options.attempts.clone());
    match start(options) {
        Ok(stream) => Ok(stream.observed_by(observed)),
        Err(error) => {
            observed.fail(&error);
            Err(error)
        }
    }
}

/// Passes an event on to the observer.
pub(super) fn observe(observed: &mut Observed, event: &Result<ChatEvent, EngineError>) {
    let observation = match event {
        Ok(ChatEvent::Routed(routed)) => Observation::Routed(&routed.model),
        Ok(ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens }) => Observation::Started {
            prompt_tokens: *prompt_tokens,
            cached_tokens: *cached_tokens,
            cache_write_tokens: *cache_write_tokens,
        },
        Ok(ChatEvent::Reasoning { delta }) => Observation::Reasoning(delta),
        Ok(ChatEvent::Text { delta, .. }) => Observation::Text(delta),
        Ok(ChatEvent::ToolCallFinished { call, .. }) => Observation::ToolCall(called(call)),
        Ok(ChatEvent::ToolCallStarted { .. } | ChatEvent::ToolCallArguments { .. }) => return,
        Ok(ChatEvent::Finished(ChatOutcome { finish, usage, timing, .. })) => {
            return observed.end(Ending::Finished { reason: finish.as_str(), usage, timing });
        }
        Err(error) => return observed.fail(error),
    };
    observed.observe(observation);
}

/// Returns the messages for the observer of a request, the newest first.
pub(crate) fn said(messages: &[ChatMessage]) -> impl Iterator<Item = PromptMessage<'_>> {
    messages.iter().rev().map(|message| PromptMessage {
        role: message.role.as_str(),
        text: message.text_with_notes(),
        reasoning: message.reasoning.as_deref(),
        name: message.name.as_deref(),
        call_id: message.tool_call_id.as_deref(),
        calls: message.tool_calls.iter().map(called).collect(),
    })
}

fn called(call: &ToolCall) -> ToolCallRef<'_> {
    ToolCallRef { id: &call.id, name: &call.name, arguments: &call.arguments }
}
