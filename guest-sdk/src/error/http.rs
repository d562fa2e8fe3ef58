//! Errors of HTTP requests.

use std::fmt;

/// Why a request has no response, or not the expected one.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpError {
    /// The request is not granted. The text names the line that would allow it.
    Denied(String),
    /// The request itself is invalid.
    InvalidRequest(String),
    /// The server could not be reached, or its response is not what was expected.
    Failed(String),
    /// The response was not complete before the timeout.
    Timeout,
    /// The request or the response exceeds its size limit.
    TooLarge(String),
    /// The turn has used up its number of requests or its number of bytes.
    LimitExceeded(String),
    /// The host terminated while the request was in flight, and it is unknown whether the server acted on it.
    /// Returned only for a POST or PATCH without an [`idempotency_key`](crate::Fetch::idempotency_key). The host
    /// repeats all other requests.
    Interrupted,
    /// The response has this status, and [`error_for_status`](crate::HttpResponse::error_for_status) required 2xx.
    Status {
        /// The status, such as 404.
        status: u16,
        /// The URL that sent the response.
        url: String,
    },
}

impl HttpError {
    /// Returns whether the same request may succeed later.
    pub fn is_retryable(&self) -> bool {
        match self {
            Self::Failed(_) | Self::Timeout => true,
            Self::Status { status, .. } => matches!(status, 408 | 429 | 500..),
            _ => false,
        }
    }
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Denied(why) => write!(f, "the request is not granted: {why}"),
            Self::InvalidRequest(what) => write!(f, "the request is invalid: {what}"),
            Self::Failed(what) => write!(f, "the request failed: {what}"),
            Self::Timeout => f.write_str("the request timed out before the response was complete"),
            Self::TooLarge(what) => write!(f, "the request exceeds a size limit: {what}"),
            Self::LimitExceeded(which) => write!(f, "the request exceeds a limit of the turn: {which}"),
            Self::Interrupted => f.write_str(
                "the host terminated while the request was in flight, and it is unknown whether the server acted on it; \
                 set an idempotency key to allow the host to repeat it",
            ),
            Self::Status { status, url } => write!(f, "{url} answered with status {status}"),
        }
    }
}

impl std::error::Error for HttpError {}
