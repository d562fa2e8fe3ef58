//! Errors, grouped by who can do something about them: the caller of the agent, the agent, or the model.
//!
//! Every message says what was wrong and, where possible, how to fix it. No type of the bindings appears
//! here.

mod host_tool;
mod http;

use std::fmt;

pub use host_tool::HostToolError;
pub use http::HttpError;

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
    /// Returns whether the same call may succeed later, or with a larger `max_tokens`.
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
                "the event was dropped because it ends a chain of {limit} events; make sure that agents do not answer \
                 each other's events in a loop"
            ),
        }
    }
}

impl std::error::Error for EmitError {}

/// Why a turn failed. All changes that the turn made to state and conversations are dropped.
///
/// The operator `?` turns every error of the SDK into one of these and keeps it, so that an agent can match
/// the cause. The caller of the agent receives the text, and for [`Inference`](Self::Inference) also the kind
/// of the error.
///
/// ```
/// use skep_sdk::{AgentError, Context, HostTool, HostToolError, Message, Reply, agent};
///
/// const STOCK: HostTool<(), u32> = HostTool::new("agent:warehouse/stock");
///
/// /// Knows the stock.
/// #[agent]
/// async fn clerk(cx: &mut Context, _message: Message) -> Result<Reply, AgentError> {
///     match stock_in_words(cx).await {
///         Err(AgentError::HostTool(HostToolError::Unavailable(_))) => Ok("Ask me later.".into()),
///         answer => Ok(Reply::text(answer?)),
///     }
/// }
///
/// async fn stock_in_words(cx: &Context) -> Result<String, AgentError> {
///     let stock = STOCK.call(cx, ()).await?;
///     cx.state().set("stock", &stock)?;
///     Ok(format!("{stock} are left"))
/// }
///
/// use skep_sdk::testing::Harness;
/// let away = |()| Err(HostToolError::Unavailable("the warehouse is closed".into()));
/// let mut harness = Harness::new(clerk).typed_host_tool(STOCK, away);
/// assert_eq!(harness.send("How many?").unwrap().reply.text, "Ask me later.");
/// ```
///
/// [`std::error::Error::source`] returns the cause, too.
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
    /// A tool of another agent, of an MCP server or of the host failed, and the agent passes the error on.
    HostTool(HostToolError),
    /// One of the agent's own tools, called by the agent itself, failed.
    Tool(ToolError),
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
            Self::HostTool(error) => error.fmt(f),
            Self::Tool(error) => error.fmt(f),
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
            Self::HostTool(error) => Some(error),
            Self::Tool(error) => Some(error),
            Self::Schedule(error) => Some(error),
            Self::Emit(error) => Some(error),
            Self::InvalidMessage(_) | Self::TooManyRounds { .. } | Self::Failed(_) => None,
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

impl From<HostToolError> for AgentError {
    fn from(error: HostToolError) -> Self {
        Self::HostTool(error)
    }
}

impl From<ToolError> for AgentError {
    fn from(error: ToolError) -> Self {
        Self::Tool(error)
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

impl From<AgentError> for ToolError {
    fn from(error: AgentError) -> Self {
        Self(error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::error::Error;

    #[test]
    fn an_agent_error_keeps_its_cause_and_its_text() {
        let denied = || "denied".to_owned();
        let causes: [(AgentError, Box<dyn Error>); 7] = [
            (InferenceError::Truncated.into(), Box::new(InferenceError::Truncated)),
            (StateError::InvalidKey(denied()).into(), Box::new(StateError::InvalidKey(denied()))),
            (HttpError::Timeout.into(), Box::new(HttpError::Timeout)),
            (HostToolError::Cancelled.into(), Box::new(HostToolError::Cancelled)),
            (ToolError::new("sold out").into(), Box::new(ToolError::new("sold out"))),
            (ScheduleError::Denied(denied()).into(), Box::new(ScheduleError::Denied(denied()))),
            (EmitError::TooManyHops { limit: 8 }.into(), Box::new(EmitError::TooManyHops { limit: 8 })),
        ];
        for (error, cause) in causes {
            assert_eq!(error.to_string(), cause.to_string());
            assert_eq!(format!("{:?}", error.source().expect("it has a cause")), format!("{cause:?}"));
        }
        assert!(AgentError::from("no").source().is_none());
        let timed_out = HostToolError::TimedOut { after_ms: 5 };
        assert_eq!(AgentError::from(timed_out.clone()), AgentError::HostTool(timed_out));
    }

    #[test]
    fn an_agent_error_becomes_a_text_for_the_model() {
        let error =
            ToolError::from(AgentError::HostTool(HostToolError::Failed("there is no order 8".into())));
        assert_eq!(error.message(), "there is no order 8");
    }
}
