//! Sends a request and reads what is not part of an answer: errors, and bodies that are not streams.
//!
//! Redirects are not followed, because the key would travel with them. An address may be a private one: the operator
//! configured it.

use reqwest::{
    Url,
    header::{ACCEPT, CONTENT_TYPE, HeaderMap, HeaderValue},
};
use skep_outbound::tls::Tls;

use crate::{
    failure::Failure,
    options::{OptionsError, Timeouts},
};

/// Maximum number of bytes of an error's body that are read; the rest is ignored.
const MAX_ERROR_BYTES: usize = 64 << 10;
/// Maximum total size of a response's headers.
const MAX_HEADER_BYTES: usize = 64 << 10;

pub(crate) struct Http {
    client: reqwest::Client,
}

impl Http {
    pub(crate) fn new(base: &Url, timeouts: &Timeouts) -> Result<Self, OptionsError> {
        let tls = Tls::of_the_machine();
        if let (Some(problem), "https") = (&tls.problem, base.scheme()) {
            let message = format!("no certificate authority is trusted: {problem}");
            return Err(OptionsError::new("url", message));
        }
        let client = tls
            .client()
            .connect_timeout(timeouts.connect)
            .build()
            .map_err(|error| OptionsError::new("url", innermost(&error)))?;
        Ok(Http { client })
    }

    /// Sends a JSON body and returns the response once its head has arrived, whatever its status.
    pub(crate) async fn post(
        &self,
        url: Url,
        mut headers: HeaderMap,
        body: Vec<u8>,
    ) -> Result<reqwest::Response, Failure> {
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(ACCEPT, HeaderValue::from_static("text/event-stream, application/json"));
        let response = self.client.post(url).headers(headers).body(body).send().await.map_err(|error| {
            let what = if error.is_connect() { "cannot connect" } else { "the exchange failed" };
            Failure::unavailable(format!("{what}: {}", innermost(&error)))
        })?;
        let sizes = response.headers().iter().map(|(name, value)| name.as_str().len() + value.len());
        if sizes.sum::<usize>() > MAX_HEADER_BYTES {
            let message = format!("the response's headers have more than {MAX_HEADER_BYTES} bytes");
            return Err(Failure::malformed(message));
        }
        Ok(response)
    }
}

/// Reads the beginning of an error's body. Reading ends quietly where the connection does.
pub(crate) async fn error_text(mut response: reqwest::Response) -> String {
    let mut body = Vec::new();
    while body.len() < MAX_ERROR_BYTES {
        match response.chunk().await {
            Ok(Some(chunk)) => body.extend_from_slice(&chunk),
            Ok(None) | Err(_) => break,
        }
    }
    body.truncate(MAX_ERROR_BYTES);
    String::from_utf8_lossy(&body).into_owned()
}

/// Reads a whole body of at most `limit` bytes.
pub(crate) async fn text(mut response: reqwest::Response, limit: usize) -> Result<String, Failure> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| broken(&error))? {
        if body.len() + chunk.len() > limit {
            return Err(too_large(limit));
        }
        body.extend_from_slice(&chunk);
    }
    String::from_utf8(body).map_err(|_| Failure::malformed("the response is not UTF-8"))
}

pub(crate) fn too_large(limit: usize) -> Failure {
    Failure::malformed(format!("the answer has more than {limit} bytes"))
}

/// Describes a connection that ended early.
pub(crate) fn broken(error: &reqwest::Error) -> Failure {
    Failure::unavailable(format!("the connection broke off: {}", innermost(error)))
}

/// Returns the last error of a chain, which is the cause; those before it say only where it happened.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut innermost = error;
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    innermost.to_string()
}
