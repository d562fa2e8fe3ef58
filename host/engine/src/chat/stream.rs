//! One answer while it is generated, by a local or by a remote model.
//!
//! Invariant: the text, the reasoning and the calls of the outcome are the concatenation of the events before
//! it. Dropping the stream cancels the generation.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::Stream;

use super::answer::{ChatEvent, ChatOutcome};
use super::local_answer::LocalAnswer;
use super::message::ChatMessage;
use super::observed::observe;
use super::options::ChatOptions;
use super::prompt;
use super::remote_answer::RemoteAnswer;
use crate::observation::Observed;
use crate::{Engine, EngineError, RolledBack, Unreported};

/// Answers `messages` without keeping a transcript.
pub fn chat(
    engine: &Engine,
    messages: &[ChatMessage],
    mut options: ChatOptions,
) -> Result<ChatStream, EngineError> {
    options.validate()?;
    let render = match options.continues_answer {
        true => prompt::render_and_continue,
        false => prompt::render_and_encode,
    };
    let prompt = render(engine, messages, &options)?;
    options.affinity.public = prompt::public_part(engine, messages, &options, &prompt.tokens);
    Ok(ChatStream::local(LocalAnswer::start(engine, prompt, options)?))
}

/// The events of one answer. Dropping the stream cancels the generation.
pub struct ChatStream {
    /// Dropped before `observed`, which then knows the last attempt of a remote model.
    source: Source,
    observed: Option<Observed>,
}

enum Source {
    Local(Box<LocalAnswer>),
    Remote(Box<RemoteAnswer>),
}

impl ChatStream {
    pub(crate) fn local(answer: LocalAnswer) -> Self {
        ChatStream { source: Source::Local(Box::new(answer)), observed: None }
    }

    pub(crate) fn remote(answer: RemoteAnswer) -> Self {
        ChatStream { source: Source::Remote(Box::new(answer)), observed: None }
    }

    pub(super) fn observed_by(self, mut observed: Observed) -> Self {
        observed.unreported(self.unreported());
        ChatStream { observed: Some(observed), ..self }
    }

    /// Returns what remote models have used and no event reports.
    pub fn unreported(&self) -> Unreported {
        match &self.source {
            Source::Local(_) => Unreported::default(),
            Source::Remote(answer) => answer.unreported().clone(),
        }
    }

    /// Waits until a remote model has begun to answer, so that a refusal is an error here and not an event. What a
    /// local model refuses is known when the stream is made.
    pub async fn begun(mut self) -> Result<Self, EngineError> {
        if let Source::Remote(answer) = &mut self.source
            && let Err(error) = answer.begin().await
        {
            self.observed.iter_mut().for_each(|observed| observed.fail(&error));
            return Err(error);
        }
        Ok(self)
    }

    /// Returns the next event, or `None` after `Finished` or an error.
    pub async fn next(&mut self) -> Option<Result<ChatEvent, EngineError>> {
        std::future::poll_fn(|cx| self.poll_event(cx)).await
    }

    /// Returns all tokens reported by an event so far, in the order of their production. Remote models report
    /// none.
    pub fn produced(&self) -> &[u32] {
        match &self.source {
            Source::Local(answer) => answer.produced(),
            Source::Remote(_) => &[],
        }
    }

    /// Returns likely mistakes in the schemas of the output or the tools, for their author.
    pub fn warnings(&self) -> Arc<[String]> {
        match &self.source {
            Source::Local(answer) => answer.warnings().clone(),
            Source::Remote(_) => Arc::default(),
        }
    }

    /// Returns the number of tokens produced so far, see [`crate::TokenStream::spent_tokens`]. For a remote
    /// model it is an estimate until the answer is complete, and includes what no event reports.
    pub fn spent_tokens(&self) -> usize {
        match &self.source {
            Source::Local(answer) => answer.spent_tokens(),
            Source::Remote(answer) => answer.spent_tokens(),
        }
    }

    /// Returns the output that had been rolled back when the last of the produced tokens was settled.
    pub fn rolled_back(&self) -> RolledBack {
        match &self.source {
            Source::Local(answer) => answer.rolled_back(),
            Source::Remote(_) => RolledBack::default(),
        }
    }

    /// Waits for the outcome.
    pub async fn outcome(mut self) -> Result<ChatOutcome, EngineError> {
        while let Some(event) = self.next().await {
            if let ChatEvent::Finished(outcome) = event? {
                return Ok(outcome);
            }
        }
        Err(EngineError::Failed("the generation ended without a result".into()))
    }

    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<ChatEvent, EngineError>>> {
        let event = match &mut self.source {
            Source::Local(answer) => answer.poll_event(cx),
            Source::Remote(answer) => answer.poll_event(cx),
        };
        let spent = self.spent_tokens();
        if let Some(observed) = &mut self.observed {
            observed.spent(spent);
            if let Poll::Ready(Some(event)) = &event {
                observe(observed, event);
            }
        }
        event
    }
}

impl Stream for ChatStream {
    type Item = Result<ChatEvent, EngineError>;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.get_mut().poll_event(cx)
    }
}
