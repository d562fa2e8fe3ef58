//! HTTP requests that the host makes for the agent, to origins that `hosts` under `[grants]` in `agent.toml`
//! names and the operator grants.
//!
//! A request is part of the turn's journal. A turn that runs again after a restart of the host gets the
//! responses that it got before, so a request that was answered is not repeated. [`HttpError::Interrupted`] reports
//! the case where it is unknown whether the request was made.

use std::fmt;
use std::time::Duration;

use serde::Serialize;

use crate::error::HttpError;
use crate::host::{FetchRequest, Host, HttpResponse};

/// Client for HTTP requests. See [`Context::http`](crate::Context::http).
#[derive(Clone, Copy)]
pub struct Http<'a> {
    pub(crate) host: &'a dyn Host,
}

/// A request under construction. It is not made before [`send`](Self::send).
#[must_use = "a request is not sent until `send` is called"]
pub struct Fetch<'a> {
    host: &'a dyn Host,
    request: FetchRequest,
    /// The error, if the body could not be written.
    problem: Option<String>,
}

impl<'a> Http<'a> {
    /// Starts a GET request.
    pub fn get(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("GET", url)
    }

    /// Starts a HEAD request.
    pub fn head(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("HEAD", url)
    }

    /// Starts a POST request. With an [`idempotency_key`](Fetch::idempotency_key) it may be repeated after a
    /// restart.
    pub fn post(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("POST", url)
    }

    /// Starts a PUT request.
    pub fn put(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("PUT", url)
    }

    /// Starts a PATCH request. With an [`idempotency_key`](Fetch::idempotency_key) it may be repeated after a
    /// restart.
    pub fn patch(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("PATCH", url)
    }

    /// Starts a DELETE request.
    pub fn delete(&self, url: impl Into<String>) -> Fetch<'a> {
        self.request("DELETE", url)
    }

    /// Starts a request with any method.
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

    /// Adds the header `Authorization: Bearer` with this token.
    pub fn bearer(self, token: impl fmt::Display) -> Self {
        self.header("authorization", format!("Bearer {token}"))
    }

    /// Sets the `idempotency-key` header, by which the server recognizes a repeated request. This allows the
    /// host to repeat the request.
    pub fn idempotency_key(self, key: impl Into<String>) -> Self {
        self.header("idempotency-key", key)
    }

    /// Adds `name=value` to the query, escaped. A fragment of the address (`#…`), which no server gets, is removed.
    pub fn query(mut self, name: &str, value: impl fmt::Display) -> Self {
        if let Some(fragment) = self.request.url.find('#') {
            self.request.url.truncate(fragment);
        }
        let separator = if self.request.url.contains('?') { '&' } else { '?' };
        self.request.url.push(separator);
        escape(name, &mut self.request.url);
        self.request.url.push('=');
        escape(&value.to_string(), &mut self.request.url);
        self
    }

    /// Sets the body to these bytes.
    pub fn body(mut self, body: impl Into<Vec<u8>>) -> Self {
        self.request.body = Some(body.into());
        self
    }

    /// Sets the body to a value as JSON.
    pub fn json<T: Serialize + ?Sized>(mut self, value: &T) -> Self {
        match serde_json::to_vec(value) {
            Ok(body) => self.header("content-type", "application/json").body(body),
            Err(error) => {
                self.problem = Some(format!("the body cannot be written as JSON: {error}"));
                self
            }
        }
    }

    /// Sets the timeout of the whole exchange, redirects included.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.request.timeout_ms = Some(u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
        self
    }

    /// Makes the request. A status such as 404 is a response and not an error; see
    /// [`error_for_status`](HttpResponse::error_for_status).
    pub async fn send(self) -> Result<HttpResponse, HttpError> {
        match self.problem {
            Some(problem) => Err(HttpError::InvalidRequest(problem)),
            None => self.host.fetch(self.request).await,
        }
    }
}

/// Percent-encodes everything except letters, digits and `-._~`.
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
