//! HTTP requests and responses as they cross between the SDK and its host.

use serde::de::DeserializeOwned;

use crate::error::HttpError;

/// A request in the form that the host receives.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchRequest {
    /// The method, such as `GET`.
    pub method: String,
    /// The URL with its query.
    pub url: String,
    /// The headers, in the order in which they were added.
    pub headers: Vec<(String, String)>,
    /// The body.
    pub body: Option<Vec<u8>>,
    /// Timeout of the whole exchange; `None` means 30 seconds.
    pub timeout_ms: Option<u32>,
}

/// A server's response, with any status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HttpResponse {
    /// The status, such as 200.
    pub status: u16,
    /// The URL of the last request, after redirects.
    pub url: String,
    /// The headers, with names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body as received. The host does not decompress it.
    pub body: Vec<u8>,
}

impl HttpResponse {
    /// Returns whether the status is 2xx.
    pub fn is_success(&self) -> bool {
        (200..300).contains(&self.status)
    }

    /// Returns the response if its status is 2xx, and an error otherwise.
    pub fn error_for_status(self) -> Result<Self, HttpError> {
        if self.is_success() {
            Ok(self)
        } else {
            Err(HttpError::Status { status: self.status, url: self.url })
        }
    }

    /// Returns the first header with this name, ignoring case.
    pub fn header(&self, name: &str) -> Option<&str> {
        let found = self.headers.iter().find(|(known, _)| known.eq_ignore_ascii_case(name));
        found.map(|(_, value)| value.as_str())
    }

    /// Returns the body as text.
    pub fn text(&self) -> Result<&str, HttpError> {
        std::str::from_utf8(&self.body).map_err(|error| self.unexpected(&format!("is not UTF-8: {error}")))
    }

    /// Parses the body as JSON.
    pub fn json<T: DeserializeOwned>(&self) -> Result<T, HttpError> {
        serde_json::from_slice(&self.body)
            .map_err(|error| self.unexpected(&format!("is not the expected JSON: {error}")))
    }

    fn unexpected(&self, problem: &str) -> HttpError {
        HttpError::Failed(format!("the body of {} {problem}", self.url))
    }
}
