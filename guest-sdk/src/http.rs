//! HTTP requests, which the host makes: to origins that `hosts` under `[grants]` in `agent.toml` names and the operator
//! grants.
//!
//! A request is part of the turn's journal. A turn that is run again after a restart of the host gets the answers that it
//! had, so a request is made once; [`HttpError::Interrupted`] says where nobody can know.

use std::fmt;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::host::Host;

/// Makes requests. See [`Context::http`](crate::Context::http).
#[derive(Clone, Copy)]
pub struct Http<'a> {
    pub(crate) host: &'a dyn Host,
}

/// A request that is being put together. Nothing happens before [`send`](Self::send).
#[must_use = "a request is made by `send`"]
pub struct Fetch<'a> {
    host: &'a dyn Host,
    request: FetchRequest,
    /// Why there is no body, if it could not be written.
    problem: Option<String>,
}

/// A request as the host is given it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchRequest {
    /// Such as `GET`.
    pub method: String,
    /// With its query.
    pub url: String,
    /// In the order in which they were added.
    pub headers: Vec<(String, String)>,
    /// What is sent.
    pub body: Option<Vec<u8>>,
    /// How long the whole exchange may take; `None` is 30 seconds.
    pub timeout_ms: Option<u32>,
}

/// What a server answered, whatever its status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpResponse {
    /// Such as 200.
    pub status: u16,
    /// Of the last request, after redirects.
    pub url: String,
    /// Names are in small letters.
    pub headers: Vec<(String, String)>,
    /// As it came; nothing is decompressed.
    pub body: Vec<u8>,
}

impl<'a> Http<'a> {
    /// A GET request.
    pub fn get(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("GET", url)
    }

    /// A HEAD request.
    pub fn head(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("HEAD", url)
    }

    /// A POST request. With an [`idempotency_key`](Fetch::idempotency_key) it may be made again after a restart.
    pub fn post(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("POST", url)
    }

    /// A PUT request.
    pub fn put(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("PUT", url)
    }

    /// A PATCH request. With an [`idempotency_key`](Fetch::idempotency_key) it may be made again after a restart.
    pub fn patch(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("PATCH", url)
    }

    /// A DELETE request.
    pub fn delete(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("DELETE", url)
    }

    /// A request of any method.
    pub fn request(&self, method: impl Into<String>, url: impl Into<String>) -> Fetch<'a> {
        let (method, url, headers) = (method.into(), url.into(), Vec::new());
        let request = FetchRequest { method, url, headers, body: None, timeout_ms: None };
        Fetch { host: self.host, request, problem: None }
    }
}

impl Fetch<'_> {
    /// Adds a header.
    pub fn header(mut self, name: impl Into<String>, value: impl Into<String>) -> Self {
        self.request.headers.push((name.into(), value.into()));
        self
    }

    /// Sends `Authorization: Bearer` with this token.
    pub fn bearer(self, token: impl fmt::Display) -> Self {
        self.header("authorization", format!("Bearer {token}"))
    }

    /// By this the server knows a request that it has seen before, so that the host may send it again.
    pub fn idempotency_key(self, key: impl Into<String>) -> Self {
        self.header("idempotency-key", key)
    }

    /// Adds `name=value` to the query, escaped.
    pub fn query(mut self, name: &str, value: impl fmt::Display) -> Self {
        let separator = if self.request.url.contains('?') { '&' } else { '?' };
        self.request.url.push(separator);
        escape(name, &mut self.request.url);
        self.request.url.push('=');
        escape(&value.to_string(), &mut self.request.url);
        self
    }

    /// Sends these bytes.
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.request.body = Some(body.into());
        self
    }

    /// Sends a value as JSON.
    pub fn json<T: Serialize + ?Sized>(mut self, value: &T) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => self.header("content-type", "application/json").body(body),
            Err(error) => {
                self.problem = Some(format!("its body cannot be written as JSON: {error}"));
                self
            }
        }
    }

    /// Bounds the whole exchange, redirects included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.request.timeout_ms = Some(u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
        self
    }

    /// Makes the request. A status such as 404 is an answer, not an error; see
    /// [`error_for_status`](HttpResponse::error_for_status).
    pub async fn send(self) -> Result<HttpResponse, HttpError> {
        match self.problem {
            Some(problem) => Err(HttpError::InvalidRequest(problem)),
            None => self.host.fetch(self.request).await,
        }
    }
}

impl HttpResponse {
    /// Whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// The response if its status is 2xx, an error otherwise.
    pub fn error_for_status(self) -> Result<Self, HttpError> {
        if self.is_success() {
            Ok(self)
        } else {
            Err(HttpError::Status { status: self.status, url: self.url })
        }
    }

    /// The first header of this name, in whatever letters.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// The body as text.
    pub fn text(&self) -> Result<&str, HttpError> {
        std::str::from_utf8(&self.body).map_err(|error| self.unexpected(&format!("is no UTF-8: {error}")))
    }

    /// The body as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, HttpError> {
        serde_json::from_slice(&self.body)
            .map_err(|error| self.unexpected(&format!("is not the JSON that was expected: {error}")))
    }

    fn unexpected(&self, problem: &str) -> HttpError {
        HttpError::Failed(format!("the body of {} {problem}", self.url))
    }
}

/// Why there is no answer, or not the one that was expected.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HttpError {
    /// Not granted. The text names the line that would allow it.
    Denied(String),
    /// The request is wrong in itself.
    InvalidRequest(String),
    /// The server could not be reached, or what it sent is not what was expected.
    Failed(String),
    /// There was no whole answer in time.
    Timeout,
    /// The request or the response is over its bound.
    TooLarge(String),
    /// The turn has made as many requests, or moved as many bytes, as it may.
    LimitExceeded(String),
    /// The host ended while the request was under way, and nobody knows whether the server acted on it. Only for a POST or
    /// PATCH without an [`idempotency_key`](Fetch::idempotency_key): others are made again.
    Interrupted,
    /// The answer has this status, where [`error_for_status`](HttpResponse::error_for_status) wanted 2xx.
    Status {
        /// Such as 404.
        status: u16,
        /// Whose answer it is.
        url: String,
    },
}

impl HttpError {
    /// Whether the same request may succeed later.
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
            Self::InvalidRequest(what) => write!(f, "the request cannot be made: {what}"),
            Self::Failed(what) => write!(f, "the request failed: {what}"),
            Self::Timeout => f.write_str("the request had no whole answer in time"),
            Self::TooLarge(what) => write!(f, "the request is over a bound: {what}"),
            Self::LimitExceeded(which) => write!(f, "the request is over a limit of the turn: {which}"),
            Self::Interrupted => f.write_str(
                "the host ended while the request was under way, and nobody knows whether the server acted on it; \
                 give it an idempotency key to have it made again",
            ),
            Self::Status { status, url } => write!(f, "{url} answered with status {status}"),
        }
    }
}

impl std::error::Error for HttpError {}

/// Everything but letters, digits and `-._~`.
fn escape(text: &str, into: &mut String) {
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => into.push(byte.into()),
            _ => {
                into.push('%');
                let digit =
                    |value: u8| char::from_digit(value.into(), 16).unwrap_or('0').to_ascii_uppercase();
                into.push(digit(byte >> 4));
                into.push(digit(byte & 15));
            }
        }
    }
}
