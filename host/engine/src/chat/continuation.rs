//! The continuation of a text by a local model, as the events of an answer.

use futures::StreamExt;

use super::answer::{ChatEvent, ChatFinish, ChatOutcome};
use super::options::ChatOptions;
use super::prompt::encode_prompt;
use super::remote_answer::RemoteAnswer;
use super::stream::ChatStream;
use crate::{Engine, EngineError, FinishReason, GenerateRequest, TokenEvent, Unreported};

/// Continues `text` without a template. The events have no tokens and no log-probabilities.
pub(crate) fn continue_text(
    engine: &Engine,
    text: &str,
    options: ChatOptions,
) -> Result<ChatStream, EngineError> {
    let prompt = encode_prompt(engine, text, &options.cancel)?;
    let tokens = engine.generate(GenerateRequest {
        sampling: options.sampling,
        seed: options.seed,
        max_tokens: options.max_tokens,
        stop: options.stop,
        ignore_eos: options.ignore_eos,
        constraint: options.output,
        affinity: options.affinity,
        priority: options.priority,
        deadline: options.deadline,
        ..GenerateRequest::new(prompt)
    })?;
    let mut said = String::new();
    let events = tokens.flat_map(move |event| {
        let events = event.map_or_else(|error| vec![Err(error)], |event| chat_events(event, &mut said));
        futures::stream::iter(events)
    });
    Ok(ChatStream::remote(RemoteAnswer::new(Box::pin(events), Unreported::default())))
}

fn chat_events(event: TokenEvent, said: &mut String) -> Vec<Result<ChatEvent, EngineError>> {
    let mut tell = |text: String| {
        said.push_str(&text);
        (!text.is_empty()).then(|| Ok(ChatEvent::Text { delta: text, logprobs: Vec::new() }))
    };
    match event {
        TokenEvent::Started { prompt_tokens, cached_tokens } => {
            vec![Ok(ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens: 0 })]
        }
        TokenEvent::PromptLogprobs(_) => Vec::new(),
        TokenEvent::Token(token) => tell(token.text).into_iter().collect(),
        TokenEvent::Finished(finished) => {
            let rest = tell(finished.text_rest);
            let finish = match finished.reason {
                FinishReason::Length => ChatFinish::Length,
                _ => ChatFinish::Stop,
            };
            let (usage, timing) = (finished.usage, finished.timing);
            let outcome = ChatOutcome { usage, timing, ..ChatOutcome::remote(std::mem::take(said), finish) };
            rest.into_iter().chain([Ok(ChatEvent::Finished(outcome))]).collect()
        }
    }
}
