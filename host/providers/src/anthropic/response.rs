//! The events of a streamed message, and errors.

use std::time::Duration;

use serde_json::{Map, Value};
use skep_engine::chat::ChatFinish;

use crate::{
    delta::{CallPart, Count, Decoder, Delta},
    failure::{Failure, shortened},
};

#[derive(Debug, Default)]
pub(crate) struct AnthropicDecoder;

impl Decoder for AnthropicDecoder {
    fn event(&mut self, data: &str) -> Result<Vec<Delta>, Failure> {
        let event: Map<String, Value> = serde_json::from_str(data).map_err(|error| {
            let start = shortened(data.chars().take(80).collect());
            Failure::malformed(format!("an event is not a JSON object ({error}): {start:?}"))
        })?;
        let part = |name: &str| event.get(name).and_then(Value::as_object);
        let kind = event.get("type").and_then(Value::as_str);
        let kind = kind.ok_or_else(|| Failure::malformed("an event has no `type`"))?;
        match kind {
            "message_start" => {
                let usage = part("message").and_then(|message| message.get("usage")?.as_object());
                Ok(usage.map(|usage| Delta::Count(count(usage))).into_iter().collect())
            }
            "content_block_start" => {
                let block = part("content_block")
                    .ok_or_else(|| Failure::malformed("`content_block_start` has no `content_block`"))?;
                block_start(index(&event)?, block)
            }
            "content_block_delta" => {
                let delta = part("delta")
                    .ok_or_else(|| Failure::malformed("`content_block_delta` has no `delta`"))?;
                block_delta(index(&event)?, delta)
            }
            "message_delta" => {
                let mut deltas = Vec::new();
                if let Some(usage) = part("usage") {
                    deltas.push(Delta::Count(count(usage)));
                }
                let field = |name: &str| part("delta").and_then(|delta| delta.get(name)?.as_str());
                if let Some(reason) = field("stop_reason") {
                    deltas.push(finish(reason)?);
                }
                deltas.extend(field("stop_sequence").map(|text| Delta::StoppedBy(text.to_owned())));
                Ok(deltas)
            }
            "message_stop" => Ok(vec![Delta::Done]),
            "error" => Err(reported_error(200, event.get("error").unwrap_or(&Value::Null), None)),
            // New kinds of events may be added at any time, and are not part of the answer.
            _ => Ok(Vec::new()),
        }
    }

    fn whole(&mut self, _body: &str) -> Result<Vec<Delta>, Failure> {
        Err(Failure::malformed("the response is JSON instead of a stream of events"))
    }
}

fn index(event: &Map<String, Value>) -> Result<usize, Failure> {
    let index = event.get("index").and_then(Value::as_u64).and_then(|index| usize::try_from(index).ok());
    index.ok_or_else(|| Failure::malformed("an event of a block has no `index`"))
}

fn text(fields: &Map<String, Value>, name: &str) -> Result<String, Failure> {
    match fields.get(name) {
        Some(Value::String(text)) => Ok(text.clone()),
        _ => Err(Failure::malformed(format!("a block has no text in `{name}`"))),
    }
}

fn block_start(index: usize, block: &Map<String, Value>) -> Result<Vec<Delta>, Failure> {
    let delta = match block.get("type").and_then(Value::as_str) {
        Some("text") => Delta::Text(text(block, "text")?),
        Some("thinking") => Delta::Reasoning(text(block, "thinking")?),
        Some("tool_use") => {
            let input = block.get("input").and_then(Value::as_object).filter(|input| !input.is_empty());
            Delta::Call(CallPart {
                index: Some(index),
                id: text(block, "id")?,
                name: text(block, "name")?,
                arguments: input.map_or_else(String::new, |input| Value::Object(input.clone()).to_string()),
            })
        }
        _ => return Ok(Vec::new()),
    };
    let empty = matches!(&delta, Delta::Text(text) | Delta::Reasoning(text) if text.is_empty());
    Ok(if empty { Vec::new() } else { vec![delta] })
}

fn block_delta(index: usize, delta: &Map<String, Value>) -> Result<Vec<Delta>, Failure> {
    let delta = match delta.get("type").and_then(Value::as_str) {
        Some("text_delta") => Delta::Text(text(delta, "text")?),
        Some("thinking_delta") => Delta::Reasoning(text(delta, "thinking")?),
        Some("input_json_delta") => {
            let arguments = text(delta, "partial_json")?;
            Delta::Call(CallPart { index: Some(index), arguments, ..CallPart::default() })
        }
        _ => return Ok(Vec::new()),
    };
    Ok(vec![delta])
}

fn finish(reason: &str) -> Result<Delta, Failure> {
    match reason {
        "max_tokens" | "model_context_window_exceeded" => Ok(Delta::Finish(ChatFinish::Length)),
        "tool_use" => Ok(Delta::Finish(ChatFinish::ToolCalls)),
        "refusal" => Err(Failure::Refused { message: "the model refuses to answer".to_owned() }),
        _ => Ok(Delta::Finish(ChatFinish::Stop)),
    }
}

/// Reads the tokens that the server counted. It counts what it read from its cache, and what it wrote to it, apart from the
/// rest of the prompt.
fn count(usage: &Map<String, Value>) -> Count {
    let number = |name: &str| {
        usage.get(name).and_then(Value::as_u64).map(|count| u32::try_from(count).unwrap_or(u32::MAX))
    };
    let (read, written) = (number("cache_read_input_tokens"), number("cache_creation_input_tokens"));
    let cached = read.unwrap_or(0).saturating_add(written.unwrap_or(0));
    Count {
        prompt: number("input_tokens").map(|rest| rest.saturating_add(cached)),
        cached: read,
        cache_write: written,
        completion: number("output_tokens"),
        // The server does not count its thinking.
        reasoning: None,
    }
}

/// Reads the body of a response that is not a success.
pub(crate) fn failure(status: u16, body: &str, retry_after: Option<Duration>) -> Failure {
    let fields: Option<Map<String, Value>> = serde_json::from_str(body).ok();
    match fields.as_ref().and_then(|fields| fields.get("error")) {
        Some(error) => reported_error(status, error, retry_after),
        None => Failure::of_status(status, body, retry_after),
    }
}

fn reported_error(status: u16, error: &Value, retry_after: Option<Duration>) -> Failure {
    let field = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
    let message = field("message");
    if message.contains("prompt is too long") || message.contains("exceed context limit") {
        return Failure::TooLong { message: message.to_owned() };
    }
    let status = match field("type") {
        "overloaded_error" => 529,
        "rate_limit_error" => 429,
        "invalid_request_error" | "request_too_large" => 400,
        "authentication_error" => 401,
        "permission_error" | "billing_error" => 403,
        "not_found_error" => 404,
        "api_error" | "timeout_error" => 500,
        _ if status < 300 => 500,
        _ => status,
    };
    Failure::of_status(status, message, retry_after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn blocks_and_counts_are_read() {
        let events = [
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 10,
                "cache_creation_input_tokens": 3, "output_tokens": 1}}}),
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "thinking", "thinking": ""}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": "hm"}}),
            json!({"type": "content_block_delta", "index": 0, "delta": {"type": "signature_delta", "signature": "s"}}),
            json!({"type": "ping"}),
            json!({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": "Hi"}}),
            json!({"type": "content_block_start", "index": 2,
                "content_block": {"type": "tool_use", "id": "t", "name": "f", "input": {}}}),
            json!({"type": "content_block_delta", "index": 2,
                "delta": {"type": "input_json_delta", "partial_json": "{}"}}),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 9}}),
            json!({"type": "message_stop"}),
        ];
        let mut decoder = AnthropicDecoder;
        let read = |event: &Value| decoder.event(&event.to_string()).expect("readable");
        let deltas: Vec<Delta> = events.iter().flat_map(read).collect();
        let part = |id: &str, name: &str, arguments: &str| {
            Delta::Call(CallPart {
                index: Some(2),
                id: id.into(),
                name: name.into(),
                arguments: arguments.into(),
            })
        };
        assert_eq!(
            deltas,
            [
                Delta::Count(Count {
                    prompt: Some(17),
                    cached: Some(10),
                    cache_write: Some(3),
                    completion: Some(1),
                    reasoning: None
                }),
                Delta::Reasoning("hm".into()),
                Delta::Text("Hi".into()),
                part("t", "f", ""),
                part("", "", "{}"),
                Delta::Count(Count { completion: Some(9), ..Count::default() }),
                Delta::Finish(ChatFinish::ToolCalls),
                Delta::Done,
            ]
        );
    }

    #[test]
    fn errors_keep_their_meaning() {
        for (status, kind, message, outcome) in [
            (529, "overloaded_error", "Overloaded", "busy"),
            (200, "overloaded_error", "Overloaded", "busy"),
            (429, "rate_limit_error", "slow", "busy"),
            (400, "invalid_request_error", "prompt is too long: 9 tokens > 8 maximum", "context_overflow"),
            (400, "invalid_request_error", "bad", "refused"),
            (401, "authentication_error", "key", "unavailable"),
            (200, "api_error", "oops", "unavailable"),
        ] {
            let body = json!({"type": "error", "error": {"type": kind, "message": message}});
            assert_eq!(failure(status, &body.to_string(), None).outcome(), outcome, "{body}");
        }
        for garbage in ["", "{}", "{\"type\": \"content_block_delta\"}", "[1]"] {
            assert_eq!(AnthropicDecoder.event(garbage).expect_err(garbage).outcome(), "malformed");
        }
    }
}
