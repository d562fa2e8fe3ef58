//! One answer of a remote model while it arrives.

use std::pin::Pin;
use std::task::{Context, Poll};

use futures::Stream;

use super::answer::ChatEvent;
use crate::{EngineError, Unreported};

/// The events of a remote model's answer, in the order of [`ChatEvent`]. Dropping the stream ends the request.
pub type RemoteStream = Pin<Box<dyn Stream<Item = Result<ChatEvent, EngineError>> + Send>>;

/// Mean length of a token's text, by which tokens of remote models are estimated.
pub(crate) const TOKEN_BYTES: usize = 4;

/// A remote answer, which always ends with `Finished` or an error.
pub(crate) struct RemoteAnswer {
    events: RemoteStream,
    /// The first event, if it was awaited before the caller asked for it.
    first: Option<ChatEvent>,
    bytes: usize,
    /// The number of tokens that the other server counted, once it has.
    counted: Option<usize>,
    unreported: Unreported,
    ended: bool,
}

impl RemoteAnswer {
    /// Creates an answer from its events. The model adds to `unreported` what they do not report.
    pub(crate) fn new(events: RemoteStream, unreported: Unreported) -> Self {
        RemoteAnswer { events, first: None, bytes: 0, counted: None, unreported, ended: false }
    }

    pub(super) fn unreported(&self) -> &Unreported {
        &self.unreported
    }

    pub(super) fn spent_tokens(&self) -> usize {
        self.counted.unwrap_or(self.bytes.div_ceil(TOKEN_BYTES)) + self.unreported.output_tokens()
    }

    /// Waits for the first event. A request that was refused is an error.
    pub(super) async fn begin(&mut self) -> Result<(), EngineError> {
        if let Some(event) = std::future::poll_fn(|cx| self.poll_event(cx)).await {
            self.first = Some(event?);
        }
        Ok(())
    }

    pub(super) fn poll_event(
        &mut self,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<ChatEvent, EngineError>>> {
        if let Some(event) = self.first.take() {
            return Poll::Ready(Some(Ok(event)));
        }
        if self.ended {
            return Poll::Ready(None);
        }
        let event = match self.events.as_mut().poll_next(cx) {
            Poll::Pending => return Poll::Pending,
            Poll::Ready(Some(event)) => event,
            Poll::Ready(None) => {
                Err(EngineError::Failed("the remote answer ended without a result".to_owned()))
            }
        };
        match &event {
            Ok(
                ChatEvent::Text { delta, .. }
                | ChatEvent::Reasoning { delta }
                | ChatEvent::ToolCallArguments { delta, .. },
            ) => self.bytes += delta.len(),
            Ok(ChatEvent::Finished(outcome)) => {
                self.counted = Some(outcome.usage.produced_tokens());
                self.ended = true;
            }
            Ok(_) => {}
            Err(_) => self.ended = true,
        }
        Poll::Ready(Some(event))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Usage;
    use crate::chat::{ChatFinish, ChatOutcome, ChatStream};

    fn answer(events: Vec<Result<ChatEvent, EngineError>>) -> ChatStream {
        ChatStream::remote(RemoteAnswer::new(Box::pin(futures::stream::iter(events)), Unreported::default()))
    }

    fn text(delta: &str) -> Result<ChatEvent, EngineError> {
        Ok(ChatEvent::Text { delta: delta.to_owned(), logprobs: Vec::new() })
    }

    #[tokio::test]
    async fn tokens_are_estimated_until_the_answer_is_complete_and_then_counted() {
        let usage = Usage { completion_tokens: 9, ..Usage::default() };
        let outcome = ChatOutcome { usage, ..ChatOutcome::remote("a reply".to_owned(), ChatFinish::Stop) };
        let mut answer = answer(vec![text("a re"), text("ply"), Ok(ChatEvent::Finished(outcome)), text("x")]);
        answer.next().await.expect("an event").expect("text");
        assert_eq!(answer.spent_tokens(), 1);
        answer.next().await.expect("an event").expect("text");
        assert_eq!(answer.spent_tokens(), 2);
        answer.next().await.expect("an event").expect("the outcome");
        assert_eq!(answer.spent_tokens(), 9);
        assert!(answer.next().await.is_none(), "nothing follows the outcome");
    }

    #[tokio::test]
    async fn a_refusal_is_known_once_the_answer_has_begun_and_nothing_else_is_lost() {
        let refused = answer(vec![Err(EngineError::Cancelled), text("x")]);
        refused.begun().await.err().expect("the request was refused");
        let mut begun = answer(vec![text("a"), text("b")]).begun().await.expect("begun");
        for expected in ["a", "b"] {
            let event = begun.next().await.expect("an event").expect("text");
            assert!(matches!(event, ChatEvent::Text { delta, .. } if delta == expected));
        }
    }

    #[tokio::test]
    async fn an_answer_that_stops_without_an_outcome_is_an_error() {
        let mut answer = answer(vec![text("half")]);
        answer.next().await.expect("an event").expect("text");
        answer.next().await.expect("an event").expect_err("no outcome came");
        assert!(answer.next().await.is_none());
    }
}
