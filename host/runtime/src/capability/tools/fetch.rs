//! `http/fetch`: a single HTTP request as a tool for models.
//!
//! The request is subject to the same grants, limits, secrets and journal records as a request of `skep:agent/http`. The
//! result is readable for a model: as much of the body, as text, as fits into a conversation, and a note if that is not all
//! of it.

use crate::{
    ToolDefinition,
    bindings::{
        http::{HttpError, Request, Response},
        tools::ToolError,
    },
    capability::{
        Turn,
        http::{DEFAULT_FETCH_TIMEOUT, make_request},
    },
    journal::{Call, Stopped},
    tool::Tool,
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use skep_outbound::ToolHints;
use std::{collections::BTreeMap, sync::Arc, time::Duration};

/// Maximum size of a response's text, about four thousand tokens.
const MAX_TEXT_BYTES: usize = 16 << 10;

#[derive(Deserialize)]
struct Arguments {
    #[serde(default = "get")]
    method: String,
    url: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    #[serde(default)]
    body: String,
}

#[derive(Serialize, Deserialize)]
struct FetchResult {
    status: u16,
    url: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    content_type: Option<String>,
    /// Size of the whole body.
    bytes: usize,
    text: String,
    /// A note on how the text differs from the body, if it does.
    #[serde(skip_serializing_if = "Option::is_none")]
    note: Option<String>,
}

fn get() -> String {
    "GET".to_owned()
}

/// Returns the definition of the tool that a model sees.
pub(in crate::capability) fn tool() -> Tool {
    let input_schema = json!({
        "type": "object",
        "properties": {
            "method": {
                "enum": ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"],
                "description": "GET, if it is left out.",
            },
            "url": {"type": "string", "pattern": "^https?://[^ ]+$"},
            "headers": {"type": "object", "additionalProperties": {"type": "string"}},
            "body": {"type": "string"},
        },
        "required": ["url"],
        "additionalProperties": false,
    });
    let output_schema = json!({
        "type": "object",
        "properties": {
            "status": {"type": "integer"},
            "url": {"type": "string", "description": "After redirects."},
            "content_type": {"type": "string"},
            "bytes": {"type": "integer", "description": "Of the whole body."},
            "text": {"type": "string", "description": "The body, or its beginning."},
            "note": {"type": "string", "description": "What the text leaves out."},
        },
        "required": ["status", "url", "bytes", "text"],
    });
    let description = format!(
        "Makes an HTTP request and gives its status and its body as text, up to {} KiB of it.",
        MAX_TEXT_BYTES >> 10
    );
    let definition = ToolDefinition {
        name: "fetch".to_owned(),
        description,
        input_schema,
        output_schema: Some(output_schema),
        // These hints cover all methods together. Whether a request may be repeated after a restart depends on its method.
        hints: ToolHints { read_only: false, destructive: true, idempotent: false, open_world: true },
        timeout_ms: None,
        retries: 0,
        needs_approval: false,
    };
    Tool::new(definition).expect("the tool's own schemas compile")
}

/// Returns whether there is any host to which the agent might be allowed to send a request.
pub(in crate::capability) fn reaches_anywhere(turn: &Turn) -> bool {
    !turn.agent.manifest.grants.hosts.is_empty() && !turn.tools.rules.granted_hosts.is_empty()
}

pub(in crate::capability) async fn call(
    turn: &Arc<Turn>,
    call: &Call,
    arguments: Value,
    timeout: Option<Duration>,
) -> Result<Result<Value, ToolError>, Stopped> {
    let timeout_ms = timeout.map(|timeout| u32::try_from(timeout.as_millis()).unwrap_or(u32::MAX));
    let request = match request(arguments, timeout_ms) {
        Ok(request) => request,
        Err(error) => return Ok(Err(ToolError::InvalidArguments(error.to_string()))),
    };
    Ok(match make_request(turn, call, request).await? {
        Ok(response) => Ok(json!(FetchResult::from(response))),
        Err(error) => Err(refusal(error, timeout)),
    })
}

/// Counts a request that was made before a restart, with the response size that the journal holds.
pub(in crate::capability) fn count_replayed_fetch(
    turn: &Turn,
    arguments: &str,
    result: &Result<String, ToolError>,
) {
    let received = match result {
        Ok(result) => serde_json::from_str(result).map_or(0, |result: FetchResult| result.bytes),
        Err(ToolError::Failed(_) | ToolError::TimedOut(_) | ToolError::Interrupted(_)) => 0,
        // No request left the host.
        Err(_) => return,
    };
    let arguments = serde_json::from_str(arguments).unwrap_or_default();
    let sent = request(arguments, None).map_or(0, |request| request.bytes());
    turn.fetched_before(sent, received);
}

fn request(arguments: Value, timeout_ms: Option<u32>) -> Result<Request, serde_json::Error> {
    let Arguments { method, url, headers, body } = serde_json::from_value(arguments)?;
    let body = (!body.is_empty()).then(|| body.into_bytes());
    Ok(Request { method, url, headers: headers.into_iter().collect(), body, timeout_ms })
}

impl From<Response> for FetchResult {
    fn from(response: Response) -> Self {
        let Response { status, url, headers, body } = response;
        let content_type =
            headers.into_iter().find(|(name, _)| name == "content-type").map(|(_, value)| value);
        let (text, note) = readable(&body, content_type.as_deref());
        FetchResult { status, url, content_type, bytes: body.len(), text, note }
    }
}

/// Returns the beginning of a body as text, and a note if the text is not the whole body.
fn readable(body: &[u8], content_type: Option<&str>) -> (String, Option<String>) {
    let (text, mut notes) = match std::str::from_utf8(body) {
        Ok(text) => (text.into(), Vec::new()),
        Err(_) if content_type.is_some_and(|kind| kind.starts_with("text/")) => {
            (String::from_utf8_lossy(body), vec!["invalid UTF-8 was replaced by \u{fffd}".to_owned()])
        }
        Err(_) => return (String::new(), Some("the body is not text, and is left out".to_owned())),
    };
    let end = text.floor_char_boundary(MAX_TEXT_BYTES);
    if end < text.len() {
        notes.push(format!("the text was cut after {end} of {} bytes", text.len()));
    }
    (text[..end].to_owned(), (!notes.is_empty()).then(|| notes.join("; ")))
}

fn refusal(error: HttpError, timeout: Option<Duration>) -> ToolError {
    match error {
        HttpError::Denied(why) | HttpError::LimitExceeded(why) => ToolError::Denied(why),
        HttpError::InvalidRequest(why) => ToolError::InvalidArguments(why),
        HttpError::Failed(why) | HttpError::TooLarge(why) => ToolError::Failed(why),
        HttpError::Timeout => {
            crate::capability::tools::call::timed_out(timeout.unwrap_or(DEFAULT_FETCH_TIMEOUT))
        }
        HttpError::Interrupted => ToolError::Interrupted(
            "the host restarted during the request, so it is unknown whether the server acted on it"
                .to_owned(),
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_body_is_returned_as_text_where_possible() {
        let long = "é".repeat(MAX_TEXT_BYTES);
        let cut = format!("the text was cut after {MAX_TEXT_BYTES} of {} bytes", long.len());
        for (body, kind, text, note) in [
            (&b"{\"a\": 1}"[..], Some("application/json"), "{\"a\": 1}", None),
            (b"", None, "", None),
            (long.as_bytes(), None, &long[..MAX_TEXT_BYTES], Some(cut.as_str())),
            (b"caf\xe9", Some("text/plain"), "caf\u{fffd}", Some("invalid UTF-8 was replaced by \u{fffd}")),
            (b"\x89PNG", Some("image/png"), "", Some("the body is not text, and is left out")),
        ] {
            let (read, said) = readable(body, kind);
            assert_eq!((read.as_str(), said.as_deref()), (text, note));
        }
    }

    #[test]
    fn arguments_default_to_a_get_request() {
        let plain = request(json!({"url": "https://x.org/"}), Some(5)).expect("valid");
        assert_eq!((plain.method.as_str(), plain.body, plain.timeout_ms), ("GET", None, Some(5)));
        let post = json!({"method": "POST", "url": "https://x.org/", "headers": {"a": "b"}, "body": "c"});
        let post = request(post, None).expect("valid");
        assert_eq!((post.headers, post.body), (vec![("a".into(), "b".into())], Some(b"c".to_vec())));
    }
}
