//! A scripted web for tests.

use serde::Serialize;

use crate::{FetchRequest, HttpError, HttpResponse};

/// Responses of servers, by method and URL. Each response is used once; responses to the same request are
/// used in the order in which they were added.
///
/// If the agent makes a request that has no response, the test panics with a message that says so.
#[derive(Debug, Clone, Default)]
pub struct ScriptedWeb {
    responses: Vec<ScriptedResponse>,
}

#[derive(Debug, Clone)]
struct ScriptedResponse {
    method: String,
    url: String,
    outcome: Result<HttpResponse, HttpError>,
}

impl ScriptedWeb {
    /// Creates a web without responses.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a response with a value as JSON.
    pub fn json<T: Serialize + ?Sized>(self, method: &str, url: &str, status: u16, value: &T) -> Self {
        let body = serde_json::to_vec(value).expect("a scripted value can be written as JSON");
        let headers = vec![("content-type".to_owned(), "application/json".to_owned())];
        self.answer(method, url, Ok(HttpResponse { status, url: url.to_owned(), headers, body }))
    }

    /// Adds a response with a text.
    pub fn text(self, method: &str, url: &str, status: u16, text: &str) -> Self {
        let headers = vec![("content-type".to_owned(), "text/plain".to_owned())];
        let (url, body) = (url.to_owned(), text.as_bytes().to_vec());
        self.answer(method, &url.clone(), Ok(HttpResponse { status, url, headers, body }))
    }

    /// Adds a request that fails.
    pub fn fail(self, method: &str, url: &str, error: HttpError) -> Self {
        self.answer(method, url, Err(error))
    }

    /// Adds a response, or an error.
    pub fn answer(mut self, method: &str, url: &str, outcome: Result<HttpResponse, HttpError>) -> Self {
        self.responses.push(ScriptedResponse { method: method.to_owned(), url: url.to_owned(), outcome });
        self
    }

    /// Takes the response to a request. The error describes the mistake in the script.
    pub(super) fn take(&mut self, request: &FetchRequest) -> Result<Result<HttpResponse, HttpError>, String> {
        let FetchRequest { method, url, .. } = request;
        match self.responses.iter().position(|answer| answer.method == *method && answer.url == *url) {
            Some(at) => Ok(self.responses.remove(at).outcome),
            None => {
                Err(format!("the agent requests {method} {url}, but the script has no response left for it"))
            }
        }
    }
}
