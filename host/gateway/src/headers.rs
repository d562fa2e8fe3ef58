//! Reads the request headers that name a session for KV cache affinity and that choose the form of the response, and
//! writes the header with schema warnings.

use crate::{ApiError, caller::Caller};
use axum::{http::HeaderMap, http::HeaderValue, response::Response};
use skep_engine::{Affinity, chat::Routed};

const MAX_HEADER_BYTES: usize = 256;
/// Response header with likely mistakes in the request's schemas, which are applied as written nevertheless.
const SCHEMA_WARNINGS: &str = "x-skep-schema-warnings";
const MAX_WARNING_BYTES: usize = 1024;
/// Maximum number of ignored fields that a response names, and their longest name.
const MAX_IGNORED: usize = 32;
const MAX_IGNORED_BYTES: usize = 80;

/// Adds likely mistakes in the request's schemas to the response as a header, and logs them.
pub(crate) fn warned(mut response: Response, warnings: &[String]) -> Response {
    if warnings.is_empty() {
        return response;
    }
    tracing::warn!(warnings = warnings.join("; "), "a schema probably contains mistakes");
    let visible = |c: char| if matches!(c, ' '..='~') { c } else { '?' };
    let text: String = warnings.join("; ").chars().map(visible).take(MAX_WARNING_BYTES).collect();
    if let Ok(value) = HeaderValue::try_from(text) {
        response.headers_mut().insert(SCHEMA_WARNINGS, value);
    }
    response
}

/// Returns the session that a client names, in any of the headers that clients use.
pub(crate) fn session(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    for name in ["x-session-affinity", "x-session-id"] {
        if let Some(value) = text(headers, name)? {
            return Ok(Some(value));
        }
    }
    Ok(None)
}

/// Adds the names of fields of the request that the host does not know and therefore ignored.
pub(crate) fn ignored(mut response: Response, names: &[String]) -> Response {
    let visible = |name: &&String| {
        (1..=MAX_IGNORED_BYTES).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_graphic())
    };
    let names: Vec<&str> = names.iter().filter(visible).map(String::as_str).take(MAX_IGNORED).collect();
    if let Some(value) =
        (!names.is_empty()).then(|| HeaderValue::try_from(names.join(", "))).and_then(Result::ok)
    {
        response.headers_mut().insert("x-skep-ignored", value);
    }
    response
}

/// Adds the model that answers, and how many models were asked.
pub(crate) fn served(mut response: Response, Routed { model, attempts }: &Routed) -> Response {
    // A local model may be named after a file whose name no header can carry.
    if let Ok(model) = HeaderValue::from_str(model) {
        response.headers_mut().insert("x-skep-model", model);
    }
    response.headers_mut().insert("x-skep-attempts", HeaderValue::from(*attempts));
    response
}

/// Returns the affinity of a request, which says where its prefix is likely cached: with its session, or with the
/// parent session from which that was opened.
pub(crate) fn affinity(headers: &HeaderMap, caller: &Caller) -> Result<Affinity, ApiError> {
    Ok(caller.affinity(session(headers)?, text(headers, "x-parent-session-id")?))
}

/// Returns the affinity of a request whose body names a session, too. A header takes precedence.
pub(crate) fn affinity_with(
    headers: &HeaderMap,
    caller: &Caller,
    named: Option<&str>,
) -> Result<Affinity, ApiError> {
    let affinity = affinity(headers, caller)?;
    let session = affinity.session.clone().or_else(|| named.map(str::to_owned));
    Ok(Affinity { session, ..affinity })
}

pub(crate) fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    text(headers, "idempotency-key")
}

/// Returns whether the client wants a response before the work is done (RFC 7240).
pub(crate) fn prefers_async(headers: &HeaderMap) -> bool {
    let preferences = headers.get_all("prefer").iter().filter_map(|value| value.to_str().ok());
    preferences.flat_map(|value| value.split(',')).any(|one| one.trim().eq_ignore_ascii_case("respond-async"))
}

/// Returns the id of the last event that a client saw before it lost the stream.
pub(crate) fn last_event_id(headers: &HeaderMap) -> Result<Option<u64>, ApiError> {
    let Some(value) = text(headers, "last-event-id")? else { return Ok(None) };
    let rule = "the header last-event-id must be the id of an event of this turn: a number";
    value.parse().map(Some).map_err(|_| ApiError::parameter("last-event-id", rule))
}

/// Returns whether the response should be a stream of events.
pub(crate) fn wants_events(headers: &HeaderMap) -> bool {
    let accepts = headers.get_all("accept").iter().filter_map(|value| value.to_str().ok());
    accepts.flat_map(|value| value.split(',')).any(|kind| kind.trim().starts_with("text/event-stream"))
}

fn text(headers: &HeaderMap, name: &str) -> Result<Option<String>, ApiError> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        let rule = format!("the header {name} is given more than once; send it once");
        return Err(ApiError::parameter(name, rule));
    }
    match value.to_str() {
        Ok(text) if (1..=MAX_HEADER_BYTES).contains(&text.len()) => Ok(Some(text.to_owned())),
        _ => {
            let rule =
                format!("the header {name} must have 1 to {MAX_HEADER_BYTES} visible ASCII characters");
            Err(ApiError::parameter(name, rule))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_header_precedes_the_session_that_the_body_names() {
        let caller = Caller::operator();
        let mut headers = HeaderMap::new();
        let affinity = affinity_with(&headers, &caller, Some("key")).unwrap();
        assert_eq!(
            (affinity.session.as_deref(), affinity.tenant.as_str()),
            (Some("key"), caller.tenant.as_str())
        );
        assert_eq!(affinity_with(&headers, &caller, None).unwrap().session, None);
        headers.insert("x-session-affinity", HeaderValue::from_static("header"));
        let affinity = affinity_with(&headers, &caller, Some("key")).unwrap();
        assert_eq!(affinity.session.as_deref(), Some("header"));
    }

    #[test]
    fn only_names_that_a_header_can_carry_are_in_it() {
        let long = "x".repeat(MAX_IGNORED_BYTES + 1);
        let names = ["a", "", "é", "b\r\nc", &long, "d.e"].map(str::to_owned);
        let response = ignored(Response::default(), &names);
        assert_eq!(response.headers()["x-skep-ignored"], "a, d.e");
        let many: Vec<String> = (0..100).map(|n| n.to_string()).collect();
        let response = ignored(Response::default(), &many);
        assert_eq!(response.headers()["x-skep-ignored"].to_str().unwrap().split(", ").count(), MAX_IGNORED);
        assert!(ignored(Response::default(), &[]).headers().is_empty());
    }
}
