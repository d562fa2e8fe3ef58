//! Errors, grouped by who can do something about them: the caller of the agent, the agent, or the model.
//!
//! Every message says what was wrong and, where possible, how to fix it. No type of the bindings appears
//! here.

use std::fmt;

use crate::HttpError;

/// Why an inference call failed, which determines what an agent can do about it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum InferenceError {
    /// The engine's queue is full.
    Busy {
        /// Time after which to retry, in milliseconds.
        retry_after_ms: u32,
    },
    /// The prompt and the requested output do not fit.
    ContextOverflow {
        /// The limit in tokens: the model's context, or what the turn may use.
        limit_tokens: u32,
    },
    /// A tool call or a constrained output was cut off by a token limit; the incomplete part was discarded.
    Truncated,
    /// A schema, regex or grammar cannot be compiled, or a value does not validate. The text names the
    /// position.
    SchemaInvalid(String),
    /// The model does not exist. The text names the models that do.
    ModelUnknown(String),
    /// The call is not granted. The text names the line that would allow it.
    Denied(String),
    /// An argument is out of range. The text names the argument.
    InvalidArgument(String),
    /// The caller disconnected, or the turn ran out of time.
    Cancelled,
    /// An internal error of the host.
    Internal(String),
}

impl InferenceError {
    /// Whether the same call may succeed later, or with a larger `max_tokens`.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Busy { .. } | Self::Truncated)
    }
}

impl fmt::Display for InferenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy { retry_after_ms } => {
                write!(f, "the engine's queue is full; try again in {retry_after_ms} ms")
            }
            Self::ContextOverflow { limit_tokens } => write!(
                f,
                "prompt and output exceed the limit of {limit_tokens} tokens; shorten the conversation or lower max_tokens"
            ),
            Self::Truncated => {
                f.write_str("a constrained output was cut off by a token limit; allow more with max_tokens")
            }
            Self::SchemaInvalid(at) => write!(f, "a schema, or a value against it, is invalid: {at}"),
            Self::ModelUnknown(known) => write!(f, "the model is unknown: {known}"),
            Self::Denied(why) => write!(f, "the call is not granted: {why}"),
            Self::InvalidArgument(what) => write!(f, "invalid argument: {what}"),
            Self::Cancelled => f.write_str("the turn was cancelled or ran out of time"),
            Self::Internal(what) => write!(f, "the host failed: {what}"),
        }
    }
}

impl std::error::Error for InferenceError {}

/// Why reading or writing the session's state failed.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum StateError {
    /// The key is empty or longer than 256 bytes.
    InvalidKey(String),
    /// A limit of the operator would be exceeded. The text says which one and by how much.
    QuotaExceeded(String),
    /// The stored value has another type than the agent asked for, or a value cannot be written as JSON.
    Json {
        /// The key of the value.
        key: String,
        /// The error and its position.
        message: String,
    },
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidKey(why) => write!(f, "invalid state key: {why}"),
            Self::QuotaExceeded(why) => write!(f, "the session's state exceeds a limit: {why}"),
            Self::Json { key, message } => write!(f, "state value `{key}` does not fit its type: {message}"),
        }
    }
}

impl std::error::Error for StateError {}

/// Why a schedule was not set.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An argument is invalid. The text names the argument and says what would be valid.
    InvalidArgument(String),
    /// The session has reached its maximum number of schedules. The text names the line that sets the limit.
    QuotaExceeded(String),
    /// The agent does not take alarms. The text says what it lacks.
    Denied(String),
}

impl fmt::Display for ScheduleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(what) => write!(f, "the schedule cannot be set: {what}"),
            Self::QuotaExceeded(why) => write!(f, "the schedule exceeds a limit: {why}"),
            Self::Denied(why) => write!(f, "the schedule is denied: {why}"),
        }
    }
}

impl std::error::Error for ScheduleError {}

/// Why an event was not emitted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum EmitError {
    /// An argument is invalid. The text names the argument and says what would be valid.
    InvalidArgument(String),
    /// The topic is not granted. The text names the line that would allow it.
    Denied(String),
    /// The turn has reached its maximum number of events. The text names the line that sets the limit.
    QuotaExceeded(String),
    /// The turn is itself the last in a chain of this many events that caused each other.
    TooManyHops {
        /// The maximum length of a chain.
        limit: u32,
    },
}

impl fmt::Display for EmitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidArgument(what) => write!(f, "the event cannot be emitted: {what}"),
            Self::Denied(why) => write!(f, "the event is denied: {why}"),
            Self::QuotaExceeded(why) => write!(f, "the event exceeds a limit: {why}"),
            Self::TooManyHops { limit } => write!(
                f,
                "the event is dropped: a chain of {limit} events led to it; make sure that agents do not answer each \
                 other's events endlessly"
            ),
        }
    }
}

impl std::error::Error for EmitError {}

/// Why a turn failed. All changes that the turn made to state and conversations are dropped.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum AgentError {
    /// The message cannot be handled. The caller gets this text.
    InvalidMessage(String),
    /// An inference call failed, and the agent passes the error on.
    Inference(InferenceError),
    /// The session's state could not be read or written.
    State(StateError),
    /// An HTTP request failed, and the agent passes the error on.
    Http(HttpError),
    /// A schedule could not be set.
    Schedule(ScheduleError),
    /// An event could not be emitted.
    Emit(EmitError),
    /// The model did not stop calling tools.
    TooManyRounds {
        /// Number of generations that `run` was allowed; see
        /// [`Conversation::max_rounds`](crate::Conversation::max_rounds).
        limit: u32,
    },
    /// Any other error. The text goes to the caller and to the log.
    Failed(String),
}

impl fmt::Display for AgentError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::InvalidMessage(why) => write!(f, "the message cannot be handled: {why}"),
            Self::Inference(error) => error.fmt(f),
            Self::State(error) => error.fmt(f),
            Self::Http(error) => error.fmt(f),
            Self::Schedule(error) => error.fmt(f),
            Self::Emit(error) => error.fmt(f),
            Self::TooManyRounds { limit } => write!(
                f,
                "the model still called tools after {limit} rounds; raise max_rounds or tell the model when to stop"
            ),
            Self::Failed(why) => f.write_str(why),
        }
    }
}

impl std::error::Error for AgentError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Inference(error) => Some(error),
            Self::State(error) => Some(error),
            Self::Http(error) => Some(error),
            Self::Schedule(error) => Some(error),
            Self::Emit(error) => Some(error),
            _ => None,
        }
    }
}

impl From<InferenceError> for AgentError {
    fn from(error: InferenceError) -> Self {
        Self::Inference(error)
    }
}

impl From<StateError> for AgentError {
    fn from(error: StateError) -> Self {
        Self::State(error)
    }
}

impl From<crate::HostToolError> for AgentError {
    fn from(error: crate::HostToolError) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<HttpError> for AgentError {
    fn from(error: HttpError) -> Self {
        Self::Http(error)
    }
}

impl From<ScheduleError> for AgentError {
    fn from(error: ScheduleError) -> Self {
        Self::Schedule(error)
    }
}

impl From<EmitError> for AgentError {
    fn from(error: EmitError) -> Self {
        Self::Emit(error)
    }
}

impl From<String> for AgentError {
    fn from(message: String) -> Self {
        Self::Failed(message)
    }
}

impl From<&str> for AgentError {
    fn from(message: &str) -> Self {
        Self::Failed(message.to_owned())
    }
}

/// The text that a tool gives to the model in place of a result. The turn continues: the model reads the text
/// and may try again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolError(String);

impl ToolError {
    /// Creates an error with this text for the model.
    pub fn new(message: impl Into<String>) -> Self {
        Self(message.into())
    }

    /// Returns the text that the model reads.
    pub fn message(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for ToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ToolError {}

impl From<String> for ToolError {
    fn from(message: String) -> Self {
        Self(message)
    }
}

impl From<&str> for ToolError {
    fn from(message: &str) -> Self {
        Self(message.to_owned())
    }
}

impl From<StateError> for ToolError {
    fn from(error: StateError) -> Self {
        Self(error.to_string())
    }
}

impl From<HttpError> for ToolError {
    fn from(error: HttpError) -> Self {
        Self(error.to_string())
    }
}

impl From<ScheduleError> for ToolError {
    fn from(error: ScheduleError) -> Self {
        Self(error.to_string())
    }
}

impl From<EmitError> for ToolError {
    fn from(error: EmitError) -> Self {
        Self(error.to_string())
    }
}

impl From<InferenceError> for ToolError {
    fn from(error: InferenceError) -> Self {
        Self(error.to_string())
    }
}
