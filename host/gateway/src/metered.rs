//! Counts the tokens of generations that clients request from a model directly for the client's tenant, however the
//! generations end.

use crate::spent::Spent;
use futures::{Stream, StreamExt};
use skep_engine::{
    EngineError, TokenEvent, TokenStream,
    chat::{ChatEvent, ChatOutcome, ChatStream},
};
use skep_runtime::TenantTokens;
use std::{
    pin::Pin,
    task::{Context, Poll},
};

/// A generation and its token counters. If it is dropped early, the tokens so far are counted.
pub(crate) struct Metered<S> {
    stream: S,
    tokens: TenantTokens,
    spent: Spent,
}

impl Metered<ChatStream> {
    /// Counts an answer, which another server may compute.
    pub(crate) fn of_chat(stream: ChatStream, mut tokens: TenantTokens, spent: Spent) -> Self {
        tokens.watch(stream.unreported());
        Metered { stream, tokens, spent }
    }
}

impl Metered<TokenStream> {
    /// Counts the continuation of a text.
    pub(crate) fn of_text(stream: TokenStream, tokens: TenantTokens, spent: Spent) -> Self {
        Metered { stream, tokens, spent }
    }
}

impl<S> Metered<S> {
    pub(crate) fn stream(&self) -> &S {
        &self.stream
    }
}

impl Metered<ChatStream> {
    /// Waits for the end of the generation and returns its outcome.
    pub(crate) async fn outcome(mut self) -> Result<ChatOutcome, EngineError> {
        while let Some(event) = self.next().await {
            if let ChatEvent::Finished(outcome) = event? {
                return Ok(outcome);
            }
        }
        Err(EngineError::Cancelled)
    }
}

impl Stream for Metered<ChatStream> {
    type Item = Result<ChatEvent, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = self.stream.poll_next_unpin(cx);
        let spent = self.stream.spent_tokens();
        self.tokens.produced(spent);
        if let Poll::Ready(Some(Ok(event))) = &event {
            self.tokens.note_chat(event);
        }
        if let Poll::Ready(Some(Ok(ChatEvent::Finished(outcome)))) = &event {
            self.spent.add(&outcome.usage);
        }
        event
    }
}

impl Stream for Metered<TokenStream> {
    type Item = Result<TokenEvent, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let event = self.stream.poll_next_unpin(cx);
        let spent = self.stream.spent_tokens();
        self.tokens.produced(spent);
        if let Poll::Ready(Some(Ok(event))) = &event {
            self.tokens.note_completion(event);
        }
        if let Poll::Ready(Some(Ok(TokenEvent::Finished(finished)))) = &event {
            self.spent.add(&finished.usage);
        }
        event
    }
}
