//! A generation that one host of a cluster asks another one for, and its answer, in the form that they have on the way.
//!
//! It has no effect at the host that computes it but the use of its engine: the host that asks knows the tenant's budgets, records
//! what was used and keeps the conversation. So a question whose answer was lost can be asked again, at any host.

use super::PeerError;
use futures::Stream;
use serde::{Deserialize, Serialize};
use skep_engine::{
    Affinity, EngineError, Priority, UpstreamFault,
    chat::{ChatEvent, ChatOptions, Input},
};
use std::{
    pin::Pin,
    time::{Duration, Instant},
};

/// A request to a model of another host. The clocks of two hosts differ, so its deadline is the time that is left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct PeerGeneration {
    model: String,
    input: Input,
    options: ChatOptions,
    is_unconstrained: bool,
    affinity: Affinity,
    is_background: bool,
    left_ms: Option<u64>,
}

/// The events of an answer that another host computes. Dropping them cancels the generation there.
pub type GenerationEvents = Pin<Box<dyn Stream<Item = Result<GenerationEvent, PeerError>> + Send>>;

/// A message from a host about a generation. `Failed` and a finished answer are the last ones.
#[derive(Clone, Debug)]
pub enum GenerationEvent {
    Event(Box<ChatEvent>),
    Failed(GenerationFailure),
}

/// The reason why a host gave no answer, or broke it off.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GenerationFailure {
    /// The host does not compute this model.
    Absent {},
    Busy {
        retry_after_ms: u32,
    },
    Loading {
        retry_after_ms: u32,
        progress: String,
    },
    Unloaded {
        why: String,
    },
    ContextOverflow {
        limit: usize,
        prompt: usize,
        requested: usize,
    },
    InvalidRequest {
        parameter: String,
        message: String,
    },
    Constraint {
        parameter: String,
        message: String,
    },
    SchemaUnsatisfied {
        place: String,
        reason: String,
        rolled_back: u32,
    },
    Truncated {},
    DeadlineExceeded {},
    /// The host ends, or has ended the generation for another reason of its own.
    Stopping {},
    Failed {
        message: String,
    },
}

impl PeerGeneration {
    /// Returns the request for an answer of this model.
    pub fn new(model: &str, input: &Input, options: &ChatOptions) -> Self {
        let left = options.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
        PeerGeneration {
            model: model.to_owned(),
            input: input.clone(),
            is_unconstrained: options.unconstrained,
            affinity: options.affinity.clone(),
            is_background: options.priority == Priority::Background,
            left_ms: left.map(|left| u64::try_from(left.as_millis()).unwrap_or(u64::MAX)),
            options: options.clone(),
        }
    }

    /// Returns the model, the input and the options on the host that has received it.
    pub(crate) fn into_parts(self) -> (String, Input, ChatOptions) {
        let PeerGeneration { model, input, options, is_unconstrained, affinity, is_background, left_ms } =
            self;
        let options = ChatOptions {
            unconstrained: is_unconstrained,
            affinity,
            priority: if is_background { Priority::Background } else { Priority::Interactive },
            // A deadline that is out of range of the clock is none.
            deadline: left_ms.and_then(|ms| Instant::now().checked_add(Duration::from_millis(ms))),
            ..options
        };
        (model, input, options)
    }
}

impl From<EngineError> for GenerationFailure {
    fn from(error: EngineError) -> Self {
        match error {
            EngineError::Busy { retry_after_ms } => Self::Busy { retry_after_ms },
            EngineError::ContextOverflow { limit, prompt, requested } => {
                Self::ContextOverflow { limit, prompt, requested }
            }
            EngineError::InvalidRequest { parameter, message } => Self::InvalidRequest { parameter, message },
            EngineError::Constraint { parameter, message } => Self::Constraint { parameter, message },
            EngineError::ModelUnknown { .. } => Self::Absent {},
            EngineError::ModelLoading { retry_after_ms, progress, .. } => {
                Self::Loading { retry_after_ms, progress }
            }
            EngineError::ModelUnloaded { why, .. } => Self::Unloaded { why },
            EngineError::SchemaUnsatisfied { place, reason, rolled_back } => {
                Self::SchemaUnsatisfied { place, reason, rolled_back }
            }
            EngineError::Truncated => Self::Truncated {},
            EngineError::DeadlineExceeded => Self::DeadlineExceeded {},
            EngineError::ShuttingDown | EngineError::Cancelled => Self::Stopping {},
            EngineError::Failed(message) => Self::Failed { message },
            error @ (EngineError::Upstream { .. } | EngineError::Model(_)) => {
                Self::Failed { message: error.to_string() }
            }
        }
    }
}

impl GenerationFailure {
    /// Returns whether another host may answer where one has failed in this way. A request with which an engine fails is asked of no
    /// other host, because it could end the engines of all of them one after the other.
    pub(super) fn may_differ(&self) -> bool {
        match self {
            Self::Absent {}
            | Self::Busy { .. }
            | Self::Loading { .. }
            | Self::Unloaded { .. }
            | Self::ContextOverflow { .. }
            | Self::Stopping {} => true,
            Self::Failed { .. }
            | Self::InvalidRequest { .. }
            | Self::Constraint { .. }
            | Self::SchemaUnsatisfied { .. }
            | Self::Truncated {}
            | Self::DeadlineExceeded {} => false,
        }
    }

    /// Returns the error of a request for this model at this host, of which a part had arrived or not.
    pub(super) fn into_error(self, model: &str, host: i64, has_output: bool) -> EngineError {
        match self {
            Self::Absent {} => {
                fault(host, has_output, format!("it does not compute the model {model} anymore"))
            }
            Self::Stopping {} => fault(host, has_output, "it is shutting down".to_owned()),
            Self::Busy { retry_after_ms } => EngineError::Busy { retry_after_ms },
            Self::Loading { retry_after_ms, progress } => {
                EngineError::ModelLoading { name: model.to_owned(), retry_after_ms, progress }
            }
            Self::Unloaded { why } => EngineError::ModelUnloaded { name: model.to_owned(), why },
            Self::ContextOverflow { limit, prompt, requested } => {
                EngineError::ContextOverflow { limit, prompt, requested }
            }
            Self::InvalidRequest { parameter, message } => EngineError::InvalidRequest { parameter, message },
            Self::Constraint { parameter, message } => EngineError::Constraint { parameter, message },
            Self::SchemaUnsatisfied { place, reason, rolled_back } => {
                EngineError::SchemaUnsatisfied { place, reason, rolled_back }
            }
            Self::Truncated {} => EngineError::Truncated,
            Self::DeadlineExceeded {} => EngineError::DeadlineExceeded,
            Self::Failed { message } => EngineError::Failed(message),
        }
    }
}

/// Returns the error of a host that gave no answer. Another answer may be asked for, even if a part of this one had arrived.
pub(super) fn fault(host: i64, has_output: bool, message: String) -> EngineError {
    let fault = if has_output { UpstreamFault::CutOff } else { UpstreamFault::Unavailable };
    EngineError::Upstream { upstream: name(host), fault, message }
}

/// Returns the name of a host in errors and in the log of requests.
pub(super) fn name(host: i64) -> String {
    format!("host {host}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use skep_engine::{Constraint, chat::ChatMessage};

    #[test]
    fn a_request_arrives_as_it_was_sent() {
        let affinity = Affinity { tenant: "t".into(), session: Some("s".into()), ..Affinity::default() };
        let sent = ChatOptions {
            output: Some(Constraint::JsonSchema(json!({"type": "integer"}))),
            unconstrained: true,
            max_tokens: Some(5),
            seed: Some(u64::MAX),
            stop: vec!["\n".into()],
            affinity,
            priority: Priority::Background,
            deadline: Some(Instant::now() + Duration::from_secs(60)),
            ..ChatOptions::default()
        };
        let input = Input::Messages(vec![ChatMessage::system("Be brief."), ChatMessage::user("hi")]);
        let text = serde_json::to_string(&PeerGeneration::new("m", &input, &sent)).expect("plain data");
        let arrived: PeerGeneration = serde_json::from_str(&text).expect("the same form");
        let (model, read, options) = arrived.into_parts();
        assert_eq!((model.as_str(), &read), ("m", &input));
        let left = options.deadline.expect("a deadline").saturating_duration_since(Instant::now());
        assert!((Duration::from_secs(50)..=Duration::from_secs(60)).contains(&left), "{left:?}");
        let same = ChatOptions { deadline: sent.deadline, ..options };
        assert_eq!(format!("{same:?}"), format!("{sent:?}"));
    }

    #[test]
    fn a_failure_arrives_with_its_code() {
        let name = || "m".to_owned();
        let errors = [
            EngineError::Busy { retry_after_ms: 5 },
            EngineError::ContextOverflow { limit: 1, prompt: 2, requested: 3 },
            EngineError::InvalidRequest { parameter: "stop".into(), message: "no".into() },
            EngineError::Constraint { parameter: "output".into(), message: "no".into() },
            EngineError::ModelLoading { name: name(), retry_after_ms: 7, progress: "reading".into() },
            EngineError::ModelUnloaded { name: name(), why: "no".into() },
            EngineError::SchemaUnsatisfied { place: "a".into(), reason: "b".into(), rolled_back: 3 },
            EngineError::Truncated,
            EngineError::DeadlineExceeded,
            EngineError::Failed("no".into()),
        ];
        for error in errors {
            let expected = (error.code(), error.to_string());
            let text = serde_json::to_string(&GenerationFailure::from(error)).expect("plain data");
            let arrived: GenerationFailure = serde_json::from_str(&text).expect("the same form");
            let arrived = arrived.into_error("m", 3, false);
            assert_eq!((arrived.code(), arrived.to_string()), expected);
        }
        let stopped = |has_output| GenerationFailure::Stopping {}.into_error("m", 3, has_output).to_string();
        assert_eq!(stopped(false), "the upstream host 3 is not available: it is shutting down");
        assert_eq!(stopped(true), "the upstream host 3 broke off its answer: it is shutting down");
    }
}
