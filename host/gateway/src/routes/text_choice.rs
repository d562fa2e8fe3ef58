//! One choice of a text completion while it is being generated, by a model of this process or of another server.

use crate::{
    ApiError,
    metered::Metered,
    openai::{Envelope, logprobs::TextLogprobs},
    sse::{self, Message, Step, Writer},
};
use axum::response::Response;
use futures::{Stream, StreamExt, stream};
use skep_api::CompletionChoice;
use skep_engine::{
    Engine, EngineError, FinishReason, TokenEvent, Usage,
    chat::{ChatEvent, ChatFinish, Routed},
};
use skep_runtime::ScoredToken;

/// One choice.
#[derive(Default)]
pub(super) struct Choice {
    pub index: usize,
    /// Text that has not been sent yet. It starts with the prompt if the prompt is to be echoed.
    pub text: String,
    pub logprobs: Option<TextLogprobs>,
    pub finish: Option<&'static str>,
    pub usage: Usage,
    /// The model that a route chose.
    pub routed: Option<Routed>,
}

/// An event of a generation that continues a text.
pub(super) trait Continues: Sized + Send + 'static {
    /// The knowledge that it takes to read an event.
    type Reader: Send + 'static;

    fn read(self, choice: &mut Choice, reader: &Self::Reader);
}

/// Reads the tokens of an engine.
pub(super) struct TokenReader {
    pub engine: Engine,
    /// The prompt, if it is to be echoed and scored.
    pub scored_prompt: Vec<u32>,
    /// Whether the text must have a form, so that an incomplete one is reported as cut off.
    pub must_be_whole: bool,
}

impl Continues for TokenEvent {
    type Reader = TokenReader;

    fn read(self, choice: &mut Choice, reader: &TokenReader) {
        let engine = &reader.engine;
        match self {
            TokenEvent::Started { .. } => {}
            TokenEvent::PromptLogprobs(scores) => {
                let Some(logprobs) = &mut choice.logprobs else { return };
                for (id, score) in reader.scored_prompt.iter().zip(&scores) {
                    logprobs.push(&ScoredToken::of(engine, *id, score.as_ref()));
                }
            }
            TokenEvent::Token(token) => {
                choice.text.push_str(&token.text);
                // The token that ends the text is not part of it.
                let ends = token.text.is_empty() && engine.info().eos.contains(&token.id);
                if let Some(logprobs) = choice.logprobs.as_mut().filter(|_| !ends) {
                    logprobs.push(&ScoredToken::of(engine, token.id, token.logprob.as_ref()));
                }
            }
            TokenEvent::Finished(finished) => {
                choice.text.push_str(&finished.text_rest);
                choice.usage = finished.usage;
                choice.finish = Some(match finished.reason {
                    FinishReason::Length => "length",
                    reason if reader.must_be_whole && reason.cuts_off() => "length",
                    _ => "stop",
                });
            }
        }
    }
}

impl Continues for ChatEvent {
    type Reader = ();

    fn read(self, choice: &mut Choice, (): &()) {
        match self {
            ChatEvent::Routed(routed) => choice.routed = Some(routed),
            ChatEvent::Text { delta, .. } => choice.text.push_str(&delta),
            ChatEvent::Finished(outcome) => {
                choice.usage = outcome.usage;
                choice.finish = Some(match outcome.finish {
                    ChatFinish::Length => "length",
                    ChatFinish::Stop | ChatFinish::ToolCalls => "stop",
                });
            }
            // A text that is continued has neither reasoning nor calls.
            ChatEvent::Started { .. }
            | ChatEvent::Reasoning { .. }
            | ChatEvent::ToolCallStarted { .. }
            | ChatEvent::ToolCallArguments { .. }
            | ChatEvent::ToolCallFinished { .. } => {}
        }
    }
}

/// A choice with the stream that generates it.
pub(super) struct Continued<S, E: Continues> {
    pub choice: Choice,
    pub reader: E::Reader,
    pub stream: Metered<S>,
}

impl Choice {
    pub(super) fn new(index: usize, text: String) -> Self {
        Choice { index, text, ..Choice::default() }
    }

    /// Returns everything generated since the last call.
    fn piece(&mut self) -> CompletionChoice {
        CompletionChoice {
            index: self.index as u32,
            text: std::mem::take(&mut self.text),
            logprobs: self.logprobs.as_mut().map(TextLogprobs::take),
            finish_reason: self.finish.map(str::to_owned),
        }
    }
}

impl<S, E: Continues> Continued<S, E>
where
    Metered<S>: Stream<Item = Result<E, EngineError>> + Unpin + Send + 'static,
{
    /// Reads the first event. A refusal is a status, not an event, so this comes before the response starts.
    pub(super) async fn begin(&mut self) -> Result<(), ApiError> {
        let first = self.stream.next().await.unwrap_or(Err(EngineError::Cancelled))?;
        first.read(&mut self.choice, &self.reader);
        Ok(())
    }

    /// Waits for the whole text, and returns it with its usage.
    pub(super) async fn whole(mut self) -> Result<(CompletionChoice, Usage), ApiError> {
        while let Some(event) = self.stream.next().await {
            event?.read(&mut self.choice, &self.reader);
        }
        let usage = self.choice.usage;
        Ok((self.choice.piece(), usage))
    }
}

/// Returns a streamed response.
pub(super) fn streamed<S, E>(
    continued: Vec<Continued<S, E>>,
    envelope: Envelope,
    sends_usage: bool,
) -> Response
where
    E: Continues,
    S: 'static,
    Metered<S>: Stream<Item = Result<E, EngineError>> + Unpin + Send + 'static,
{
    let mut choices = Vec::new();
    let mut streams = Vec::new();
    for (index, Continued { choice, reader, stream }) in continued.into_iter().enumerate() {
        choices.push((choice, reader));
        streams.push(stream.map(move |event| (index, event)));
    }
    sse::respond(stream::select_all(streams), ChunkWriter::<E> { choices, envelope, sends_usage })
}

struct ChunkWriter<E: Continues> {
    choices: Vec<(Choice, E::Reader)>,
    envelope: Envelope,
    sends_usage: bool,
}

impl<E: Continues> Writer for ChunkWriter<E> {
    type Item = (usize, Result<E, EngineError>);

    fn write(&mut self, (index, event): Self::Item) -> Step {
        let (choice, reader) = &mut self.choices[index];
        match event {
            Ok(event) => event.read(choice, reader),
            Err(error) => return Step::Break(vec![Message::data(&ApiError::from(error).body())]),
        }
        if let Some(routed) = choice.routed.take() {
            self.envelope.set_model(routed.model);
        }
        // A token whose text is held back is sent with the one that completes it.
        if choice.text.is_empty() && choice.finish.is_none() {
            return Step::Go(Vec::new());
        }
        let piece = choice.piece();
        Step::Go(vec![Message::data(&self.envelope.text(vec![piece], None))])
    }

    fn end(&mut self) -> Vec<Message> {
        let mut usage = Usage::default();
        self.choices.iter().for_each(|(choice, _)| usage.add(&choice.usage));
        let usage = self.sends_usage.then(|| Message::data(&self.envelope.text(Vec::new(), Some(&usage))));
        usage.into_iter().chain([Message::done()]).collect()
    }
}
