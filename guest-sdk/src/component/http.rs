//! HTTP requests through the bindings.

use super::bindings::skep::agent::http as wit;
use crate::{FetchRequest, HttpError, HttpResponse};

pub(super) async fn fetch(request: FetchRequest) -> Result<HttpResponse, HttpError> {
    let FetchRequest { method, url, headers, body, timeout_ms } = request;
    let answered = wit::fetch(wit::Request { method, url, headers, body, timeout_ms }).await;
    let wit::Response { status, url, headers, body } = answered.map_err(error_from)?;
    Ok(HttpResponse { status, url, headers, body })
}

pub(super) fn secret(name: &str) -> Result<String, HttpError> {
    wit::secret(name).map_err(error_from)
}

fn error_from(error: wit::HttpError) -> HttpError {
    match error {
        wit::HttpError::Denied(why) => HttpError::Denied(why),
        wit::HttpError::InvalidRequest(what) => HttpError::InvalidRequest(what),
        wit::HttpError::Failed(what) => HttpError::Failed(what),
        wit::HttpError::Timeout => HttpError::Timeout,
        wit::HttpError::TooLarge(what) => HttpError::TooLarge(what),
        wit::HttpError::LimitExceeded(which) => HttpError::LimitExceeded(which),
        wit::HttpError::Interrupted => HttpError::Interrupted,
    }
}
