//! The caller's end of one generation. Dropping it cancels the generation: the loop notices the closed channel
//! before its next step and frees the sequence's pages. A stream always terminates, and always with `Finished`
//! or an error.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::task::{Context, Poll};

use tokio::sync::mpsc;

use crate::generation_span::GenerationSpan;
use crate::observation::{Ending, Observation, Observed};
use crate::{EngineError, Finished, TokenEvent};

pub(crate) type EventSender = mpsc::Sender<Result<TokenEvent, EngineError>>;
pub(crate) type EventReceiver = mpsc::Receiver<Result<TokenEvent, EngineError>>;

/// Creates a channel with room for every event that a generation of `max_tokens` tokens can produce, so that
/// the loop never waits for a slow reader.
pub(crate) fn channel(max_tokens: usize) -> (EventSender, EventReceiver) {
    mpsc::channel(max_tokens.saturating_add(8))
}

/// The events of one generation, in order.
#[derive(Debug)]
pub struct TokenStream {
    events: EventReceiver,
    ended: bool,
    span: GenerationSpan,
    observed: Option<Observed>,
    spent: SpentTokens,
    warnings: Arc<[String]>,
}

/// The number of tokens that a generation has produced, reported or not.
#[derive(Debug, Clone, Default)]
pub(crate) struct SpentTokens(Arc<AtomicUsize>);

impl SpentTokens {
    /// Sets the number of tokens so far. Only the engine's loop calls it.
    pub fn set(&self, tokens: usize) {
        self.0.store(tokens, Relaxed);
    }
}

impl TokenStream {
    pub(crate) fn new(
        events: EventReceiver,
        (span, observed): (GenerationSpan, Option<Observed>),
        spent: SpentTokens,
        warnings: Arc<[String]>,
    ) -> Self {
        TokenStream { events, ended: false, span, observed, spent, warnings }
    }

    /// Returns likely mistakes in the request's constraint, for its author.
    pub fn warnings(&self) -> &Arc<[String]> {
        &self.warnings
    }

    /// Returns the number of tokens produced so far, including those that are held until they are checked and
    /// those that were rolled back. Budgets count this number, however the generation finishes.
    pub fn spent_tokens(&self) -> usize {
        self.spent.0.load(Relaxed)
    }

    /// Returns the next event, or `None` after `Finished` or an error.
    pub async fn next(&mut self) -> Option<Result<TokenEvent, EngineError>> {
        std::future::poll_fn(|cx| self.poll_event(cx)).await
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<TokenEvent, EngineError>>> {
        if self.ended {
            return Poll::Ready(None);
        }
        let received = self.events.poll_recv(cx);
        let spent = self.spent_tokens();
        self.observed.iter_mut().for_each(|observed| observed.spent(spent));
        let event = match received {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(event)) => event,
            Poll::Ready(None) => Err(EngineError::Failed("the engine stopped unexpectedly".to_string())),
        };
        self.span.observe(&event);
        self.observed.iter_mut().for_each(|observed| observe(observed, &event));
        self.ended = matches!(event, Ok(TokenEvent::Finished(_)) | Err(_));
        Poll::Ready(Some(event))
    }
}

/// Passes an event on to the observer of the request.
fn observe(observed: &mut Observed, event: &Result<TokenEvent, EngineError>) {
    match event {
        Ok(TokenEvent::Started { prompt_tokens, cached_tokens }) => {
            let (prompt_tokens, cached_tokens) = (*prompt_tokens, *cached_tokens);
            observed.observe(Observation::Started { prompt_tokens, cached_tokens, cache_write_tokens: 0 });
        }
        Ok(TokenEvent::PromptLogprobs(_)) => {}
        Ok(TokenEvent::Token(token)) => observed.observe(Observation::Text(&token.text)),
        Ok(TokenEvent::Finished(Finished { reason, text_rest, usage, timing, .. })) => {
            observed.observe(Observation::Text(text_rest));
            observed.end(Ending::Finished { reason: reason.as_str(), usage, timing });
        }
        Err(error) => observed.fail(error),
    }
}

impl futures::Stream for TokenStream {
    type Item = Result<TokenEvent, EngineError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_event(cx)
    }
}
