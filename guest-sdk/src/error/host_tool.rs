//! Errors of tools that the host calls.

use std::fmt;

use super::ToolError;

/// Why a call returned no result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HostToolError {
    /// The tool does not exist.
    Unknown(String),
    /// The tool is not granted. The text names the line that would allow it.
    Denied(String),
    /// The arguments do not validate. The text names the position of the error.
    InvalidArguments(String),
    /// The tool failed. The text is the tool's own error.
    Failed(String),
    /// The tool returned no result in time. It is unknown whether it did its work.
    TimedOut {
        /// The time that the host waited, in milliseconds.
        after_ms: u32,
    },
    /// The tool cannot be reached at present. Nothing was done.
    Unavailable(String),
    /// The host was restarted during the call, or lost its connection to the tool's server. It is unknown whether the tool
    /// did its work.
    Interrupted(String),
    /// A person rejected the call, or nobody decided in time.
    Refused(String),
    /// The turn ran out of time, or its caller disconnected.
    Cancelled,
    /// The result or an argument does not fit the Rust type that the agent expects.
    Json(String),
}

impl HostToolError {
    /// Returns whether the same call may succeed later without doing anything twice.
    pub fn is_retryable(&self) -> bool {
        matches!(self, Self::Unavailable(_))
    }
}

impl fmt::Display for HostToolError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown(why)
            | Self::Denied(why)
            | Self::Failed(why)
            | Self::Refused(why)
            | Self::Json(why) => f.write_str(why),
            Self::InvalidArguments(why) => write!(f, "the arguments are not valid: {why}"),
            Self::TimedOut { after_ms } => {
                write!(f, "no result within {after_ms} ms; the tool may still have done its work")
            }
            Self::Unavailable(why) => write!(f, "not available at present: {why}"),
            Self::Interrupted(why) => write!(f, "interrupted: {why}"),
            Self::Cancelled => f.write_str("the turn was cancelled or ran out of time"),
        }
    }
}

impl std::error::Error for HostToolError {}

impl From<HostToolError> for ToolError {
    fn from(error: HostToolError) -> Self {
        ToolError::new(error.to_string())
    }
}
