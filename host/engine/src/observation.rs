//! Observation of requests to models: the messages, the answer, and the result.
//!
//! A request is observed once, where it enters the engine: an answer of a chat at [`crate::Model`], the continuation of
//! a text at [`crate::Engine`]. An observer must not block, because it is called on the path of the answer.

use std::borrow::Cow;
use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::{EngineError, Timing, Unreported, UnreportedUse, Usage};

/// Maximum number of attempts that are kept of one request.
const MAX_ATTEMPTS: usize = 64;

/// Observes requests.
pub trait Observer: Debug + Send + Sync {
    /// Returns the observer of a request to `model`. `said` are the messages of the request, the newest first.
    fn request_started(
        &self,
        model: &str,
        said: &mut dyn Iterator<Item = PromptMessage<'_>>,
    ) -> Box<dyn RequestObserver>;
}

/// Observes one request.
pub trait RequestObserver: Send {
    fn observe(&mut self, observation: Observation<'_>);

    /// Records the end of the request.
    fn request_ended(self: Box<Self>, ending: Ending<'_>, spent: SpentTokens, attempts: Vec<Attempt>);
}

/// A message of a request, or the text that it continues.
#[derive(Debug, Clone)]
pub struct PromptMessage<'a> {
    /// The speaker, or `prompt` for a text to continue.
    pub role: &'static str,
    pub text: Cow<'a, str>,
    pub reasoning: Option<&'a str>,
    /// The name of the tool that answers, or of the speaker.
    pub name: Option<&'a str>,
    /// The call that a tool answers.
    pub call_id: Option<&'a str>,
    pub calls: Vec<ToolCallRef<'a>>,
}

impl<'a> PromptMessage<'a> {
    /// Returns a text that the model continues.
    pub(crate) fn prompt(text: Cow<'a, str>) -> Self {
        PromptMessage { role: "prompt", text, reasoning: None, name: None, call_id: None, calls: Vec::new() }
    }
}

/// A call of a tool.
#[derive(Debug, Clone, Copy)]
pub struct ToolCallRef<'a> {
    pub id: &'a str,
    pub name: &'a str,
    /// JSON, as the model wrote it.
    pub arguments: &'a str,
}

/// A part of an answer.
#[derive(Debug, Clone, Copy)]
pub enum Observation<'a> {
    /// A route chose the model that answers.
    Routed(&'a str),
    Started {
        prompt_tokens: u32,
        cached_tokens: u32,
        cache_write_tokens: u32,
    },
    Reasoning(&'a str),
    Text(&'a str),
    ToolCall(ToolCallRef<'a>),
}

/// The end of a request.
#[derive(Debug, Clone, Copy)]
pub enum Ending<'a> {
    Finished {
        reason: &'static str,
        usage: &'a Usage,
        timing: &'a Timing,
    },
    Failed(&'a EngineError),
    /// Nobody waited for the answer any longer.
    Cancelled,
}

/// The tokens of a request that neither its events nor its end report.
#[derive(Debug, Clone, Default)]
pub struct SpentTokens {
    /// Number of output tokens of the answer that were produced, which is an estimate unless the request was finished.
    pub output: usize,
    /// The use of remote models that no event reports.
    pub unreported: Vec<UnreportedUse>,
}

/// One attempt to get an answer: a request that was sent to an upstream, or a model of this process that a route tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// The upstream, or `None` for a model of this process.
    pub upstream: Option<String>,
    pub model: String,
    /// The word `ok`, `cancelled`, or the name of the fault.
    pub outcome: &'static str,
    /// The status of the upstream's response, if there was one.
    pub status: Option<u16>,
    pub time: Duration,
}

/// The attempts of one request, if anybody observes it. Clones share them.
#[derive(Debug, Clone, Default)]
pub struct Attempts(Option<Arc<Mutex<Vec<Attempt>>>>);

/// An attempt that has begun. Dropping it notes that it was cancelled.
#[derive(Debug)]
pub struct PendingAttempt {
    attempts: Attempts,
    upstream: Option<String>,
    model: String,
    began: Instant,
    ended: bool,
}

impl Attempts {
    pub(crate) fn kept() -> Self {
        Attempts(Some(Arc::default()))
    }

    /// Begins an attempt to get an answer from a model, of an upstream or of this host.
    pub fn begin(&self, upstream: Option<&str>, model: &str) -> PendingAttempt {
        PendingAttempt {
            attempts: self.clone(),
            upstream: upstream.map(str::to_owned),
            model: model.to_owned(),
            began: Instant::now(),
            ended: false,
        }
    }

    fn take(&self) -> Vec<Attempt> {
        let Some(attempts) = &self.0 else { return Vec::new() };
        std::mem::take(&mut *attempts.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn note(&self, attempt: Attempt) {
        let Some(attempts) = &self.0 else { return };
        let mut attempts = attempts.lock().unwrap_or_else(PoisonError::into_inner);
        if attempts.len() < MAX_ATTEMPTS {
            attempts.push(attempt);
        }
    }
}

impl PendingAttempt {
    /// Notes how the attempt ended. An attempt that is dropped instead was cancelled.
    pub fn ended(mut self, outcome: &'static str, status: Option<u16>) {
        self.note(outcome, status);
    }

    fn note(&mut self, outcome: &'static str, status: Option<u16>) {
        self.ended = true;
        let (upstream, model) = (self.upstream.take(), std::mem::take(&mut self.model));
        let time = self.began.elapsed();
        self.attempts.note(Attempt { upstream, model, outcome, status, time });
    }
}

impl Drop for PendingAttempt {
    fn drop(&mut self) {
        if !self.ended {
            self.note("cancelled", None);
        }
    }
}

/// The observer of a request in progress. If it is dropped before the end, the request was cancelled.
pub(crate) struct Observed {
    /// `None` after the end.
    observer: Option<Box<dyn RequestObserver>>,
    attempts: Attempts,
    spent_tokens: usize,
    unreported: Unreported,
}

impl Observed {
    /// Starts the observation of a request with the messages that were `said` in its prompt.
    pub fn begin(
        observer: &dyn Observer,
        model: &str,
        said: &mut dyn Iterator<Item = PromptMessage<'_>>,
        attempts: Attempts,
    ) -> Self {
        Observed {
            observer: Some(observer.request_started(model, said)),
            attempts,
            spent_tokens: 0,
            unreported: Unreported::default(),
        }
    }

    /// Sets the number of output tokens produced so far, reported or not.
    pub fn spent(&mut self, tokens: usize) {
        self.spent_tokens = tokens;
    }

    /// Sets the record of what no event reports.
    pub fn unreported(&mut self, unreported: Unreported) {
        self.unreported = unreported;
    }

    /// Passes a part of the answer to the observer. Does nothing after the end.
    pub fn observe(&mut self, observation: Observation<'_>) {
        if let Some(observer) = &mut self.observer {
            observer.observe(observation);
        }
    }

    /// Ends the observation with an error, which may be a cancellation.
    pub fn fail(&mut self, error: &EngineError) {
        self.end(match error {
            EngineError::Cancelled => Ending::Cancelled,
            error => Ending::Failed(error),
        });
    }

    /// Reports the end with the tokens and the attempts of the request. Only the first call has an effect.
    pub fn end(&mut self, ending: Ending<'_>) {
        if let Some(observer) = self.observer.take() {
            let unreported = self.unreported.uses();
            let hidden: usize = unreported.iter().map(|used| used.usage.produced_tokens()).sum();
            let spent = SpentTokens { output: self.spent_tokens.saturating_sub(hidden), unreported };
            observer.request_ended(ending, spent, self.attempts.take());
        }
    }
}

impl Drop for Observed {
    fn drop(&mut self) {
        self.end(Ending::Cancelled);
    }
}

impl Debug for Observed {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Observed").field("spent_tokens", &self.spent_tokens).finish_non_exhaustive()
    }
}
