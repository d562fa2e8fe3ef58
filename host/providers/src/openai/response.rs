//! The chunks of a streamed answer, and errors.
//!
//! Servers differ: some leave out `[DONE]`, send the usage with the last choice, send whole calls at once, or do not
//! number them. What cannot be read is an error; unknown fields are not.

use std::time::Duration;

use serde_json::{Map, Value};
use skep_engine::chat::ChatFinish;

use crate::{
    delta::{CallPart, Count, Decoder, Delta},
    failure::{Again, Failure, shortened},
};

/// The data of the event that ends a stream.
const DONE: &str = "[DONE]";
/// Codes and types of errors that mean that the prompt is too long.
const TOO_LONG: &[&str] = &["context_length_exceeded", "exceed_context_size_error", "context_overflow"];
/// Codes and types of account errors that do not resolve by waiting.
const USED_UP: &[&str] = &["insufficient_quota", "billing_not_active"];

#[derive(Debug, Default)]
pub(crate) struct OpenAiDecoder;

impl Decoder for OpenAiDecoder {
    fn event(&mut self, data: &str) -> Result<Vec<Delta>, Failure> {
        if data.trim() == DONE {
            return Ok(vec![Delta::Done]);
        }
        chunk(&parse(data)?)
    }

    fn whole(&mut self, body: &str) -> Result<Vec<Delta>, Failure> {
        let mut deltas = chunk(&parse(body)?)?;
        deltas.push(Delta::Done);
        Ok(deltas)
    }
}

fn parse(data: &str) -> Result<Map<String, Value>, Failure> {
    serde_json::from_str(data).map_err(|error| {
        let start = shortened(data.chars().take(80).collect());
        Failure::malformed(format!("an event is not a JSON object ({error}): {start:?}"))
    })
}

/// Reads one chunk, or a whole answer, which has a `message` where a chunk has a `delta`. A text completion has `text`
/// instead of both.
pub(crate) fn chunk(chunk: &Map<String, Value>) -> Result<Vec<Delta>, Failure> {
    if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
        return Err(reported_error(200, error, None));
    }
    let mut deltas = Vec::new();
    let choices = chunk.get("choices").and_then(Value::as_array);
    let usage_field = chunk.get("usage").filter(|usage| !usage.is_null());
    if choices.is_none() && usage_field.is_none() {
        return Err(Failure::malformed("an event has neither `choices` nor `usage` nor `error`"));
    }
    let first = choices
        .into_iter()
        .flatten()
        .find(|choice| choice.get("index").and_then(Value::as_u64).is_none_or(|index| index == 0));
    if let Some(choice) = first {
        let delta = choice.get("delta").or_else(|| choice.get("message"));
        if let Some(Value::Object(delta)) = delta {
            read_delta(delta, &mut deltas)?;
        } else if let Some(text) = choice.get("text").and_then(Value::as_str).filter(|text| !text.is_empty())
        {
            deltas.push(Delta::Text(text.to_owned()));
        }
        if let Some(usage) = choice.get("usage").and_then(Value::as_object) {
            deltas.push(Delta::Count(self::usage(usage)));
        }
        if let Some(reason) = choice.get("finish_reason").and_then(Value::as_str) {
            deltas.push(finish(reason)?);
        }
        // The names in vLLM and in SGLang. A token that ends the answer is a number.
        let stop = ["stop_reason", "matched_stop"].into_iter().find_map(|name| choice.get(name)?.as_str());
        deltas.extend(stop.map(|text| Delta::StoppedBy(text.to_owned())));
    }
    if let Some(Value::Object(usage)) = usage_field {
        deltas.push(Delta::Count(self::usage(usage)));
    }
    Ok(deltas)
}

fn read_delta(delta: &Map<String, Value>, deltas: &mut Vec<Delta>) -> Result<(), Failure> {
    let reasoning = [text(delta, "reasoning_content")?, text(delta, "reasoning")?];
    if let Some(reasoning) = reasoning.into_iter().flatten().find(|text| !text.is_empty()) {
        deltas.push(Delta::Reasoning(reasoning));
    }
    if let Some(text) = text(delta, "content")?.filter(|text| !text.is_empty()) {
        deltas.push(Delta::Text(text));
    }
    if let Some(refusal) = text(delta, "refusal")?.filter(|text| !text.is_empty()) {
        return Err(Failure::Refused { message: format!("the model refuses to answer: {refusal}") });
    }
    match delta.get("tool_calls") {
        None | Some(Value::Null) => {}
        Some(Value::Array(calls)) => {
            for call in calls {
                deltas.push(Delta::Call(call_part(call)?));
            }
        }
        Some(_) => return Err(Failure::malformed("`tool_calls` is not a list")),
    }
    Ok(())
}

fn text(fields: &Map<String, Value>, name: &str) -> Result<Option<String>, Failure> {
    match fields.get(name) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(text)) => Ok(Some(text.clone())),
        Some(_) => Err(Failure::malformed(format!("`{name}` is not a text"))),
    }
}

fn call_part(call: &Value) -> Result<CallPart, Failure> {
    let Value::Object(call) = call else { return Err(Failure::malformed("a tool call is not an object")) };
    let nothing = Map::new();
    let function = call.get("function").and_then(Value::as_object).unwrap_or(&nothing);
    let arguments = match function.get("arguments") {
        Some(arguments @ Value::Object(_)) => arguments.to_string(),
        _ => text(function, "arguments")?.unwrap_or_default(),
    };
    Ok(CallPart {
        index: call.get("index").and_then(Value::as_u64).and_then(|index| usize::try_from(index).ok()),
        id: text(call, "id")?.unwrap_or_default(),
        name: text(function, "name")?.unwrap_or_default(),
        arguments,
    })
}

fn finish(reason: &str) -> Result<Delta, Failure> {
    match reason {
        "length" => Ok(Delta::Finish(ChatFinish::Length)),
        "tool_calls" | "function_call" => Ok(Delta::Finish(ChatFinish::ToolCalls)),
        "content_filter" => {
            Err(Failure::Refused { message: "its content filter stopped the answer".to_owned() })
        }
        _ => Ok(Delta::Finish(ChatFinish::Stop)),
    }
}

/// Reads the tokens that the server counted.
pub(crate) fn usage(usage: &Map<String, Value>) -> Count {
    let number = |fields: &Map<String, Value>, name: &str| {
        fields.get(name).and_then(Value::as_u64).map(|count| u32::try_from(count).unwrap_or(u32::MAX))
    };
    let details = |name: &str| usage.get(name).and_then(Value::as_object);
    let (prompt, completion) = (details("prompt_tokens_details"), details("completion_tokens_details"));
    Count {
        prompt: number(usage, "prompt_tokens"),
        cached: prompt.and_then(|details| number(details, "cached_tokens")),
        // Not of OpenAI, but of servers that pass requests on to others.
        cache_write: prompt.and_then(|details| number(details, "cache_write_tokens")),
        completion: number(usage, "completion_tokens"),
        reasoning: completion.and_then(|details| number(details, "reasoning_tokens")),
    }
}

/// Reads the body of a response that is not a success.
pub(crate) fn failure(status: u16, body: &str, retry_after: Option<Duration>) -> Failure {
    match serde_json::from_str::<Map<String, Value>>(body) {
        Ok(fields) => match fields.get("error").filter(|error| !error.is_null()) {
            Some(error) => reported_error(status, error, retry_after),
            // Some servers put the error's fields at the top.
            None if fields.contains_key("message") => {
                reported_error(status, &Value::Object(fields), retry_after)
            }
            None => Failure::of_status(status, body, retry_after),
        },
        Err(_) => Failure::of_status(status, body, retry_after),
    }
}

/// Classifies an error object. Inside a stream, whose status was a success, the error's own code replaces it.
fn reported_error(status: u16, error: &Value, retry_after: Option<Duration>) -> Failure {
    let field = |name: &str| error.get(name).and_then(Value::as_str).unwrap_or_default();
    let message = match (error.as_str(), field("message")) {
        (Some(text), _) => text.to_owned(),
        (None, "") => error.to_string(),
        (None, text) => text.to_owned(),
    };
    let codes = [field("code"), field("type")];
    let too_long = message.contains("maximum context length");
    if too_long || codes.iter().any(|code| TOO_LONG.contains(code)) {
        return Failure::TooLong { message };
    }
    if codes.iter().any(|code| USED_UP.contains(code)) {
        let again = Again::Never;
        return Failure::Unavailable { message, again };
    }
    let number = error.get("code").and_then(Value::as_u64).and_then(|code| u16::try_from(code).ok());
    let status = match status {
        200..=299 => number.filter(|code| (300..600).contains(code)).unwrap_or(match codes {
            ["rate_limit_exceeded" | "busy" | "queue_full", _] | [_, "rate_limit_error"] => 429,
            [_, "invalid_request_error"] => 400,
            _ => 500,
        }),
        status => status,
    };
    Failure::of_status(status, &message, retry_after)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(events: &[Value]) -> Vec<Delta> {
        let mut decoder = OpenAiDecoder;
        events.iter().flat_map(|event| decoder.event(&event.to_string()).expect("readable")).collect()
    }

    fn choice(delta: Value) -> Value {
        json!({"choices": [{"index": 0, "delta": delta}]})
    }

    #[test]
    fn text_reasoning_calls_and_usage_are_read() {
        let call = json!({"index": 1, "id": "c", "function": {"name": "f", "arguments": "{"}});
        let deltas = read(&[
            choice(json!({"role": "assistant", "content": ""})),
            choice(json!({"reasoning_content": "hm"})),
            choice(json!({"reasoning": "so"})),
            choice(json!({"content": "Hi"})),
            choice(json!({"tool_calls": [call, {"function": {"name": "g", "arguments": {"a": 1}}}]})),
            json!({"choices": [{"delta": {}, "finish_reason": "tool_calls"}], "usage": null}),
            json!({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3,
                "prompt_tokens_details": {"cached_tokens": 5, "cache_write_tokens": 1}, "completion_tokens_details": {"reasoning_tokens": 2}}}),
        ]);
        let part = |index, id: &str, name: &str, arguments: &str| {
            Delta::Call(CallPart { index, id: id.into(), name: name.into(), arguments: arguments.into() })
        };
        assert_eq!(
            deltas,
            [
                Delta::Reasoning("hm".into()),
                Delta::Reasoning("so".into()),
                Delta::Text("Hi".into()),
                part(Some(1), "c", "f", "{"),
                part(None, "", "g", "{\"a\":1}"),
                Delta::Finish(ChatFinish::ToolCalls),
                Delta::Count(Count {
                    prompt: Some(7),
                    cached: Some(5),
                    cache_write: Some(1),
                    completion: Some(3),
                    reasoning: Some(2)
                }),
            ]
        );
    }

    #[test]
    fn errors_keep_their_meaning_inside_and_outside_of_streams() {
        for (status, body, outcome) in [
            (400, json!({"error": {"message": "x", "code": "context_length_exceeded"}}), "context_overflow"),
            (
                400,
                json!({"error": {"message": "This model's maximum context length is 9"}}),
                "context_overflow",
            ),
            (
                400,
                json!({"error": {"message": "x", "type": "exceed_context_size_error"}}),
                "context_overflow",
            ),
            (429, json!({"error": {"message": "x", "code": "insufficient_quota"}}), "unavailable"),
            (429, json!({"error": {"message": "x"}}), "busy"),
            (500, json!("oops"), "unavailable"),
            (200, json!({"error": {"message": "x", "code": 429}}), "busy"),
            (200, json!({"error": {"message": "x", "type": "rate_limit_error"}}), "busy"),
            (200, json!({"error": "overloaded"}), "unavailable"),
            (400, json!({"message": "x", "object": "error"}), "refused"),
        ] {
            assert_eq!(failure(status, &body.to_string(), None).outcome(), outcome, "{body}");
        }
        let error =
            OpenAiDecoder.event("{\"error\": {\"message\": \"no\", \"code\": 503}}").expect_err("error");
        assert_eq!(error.outcome(), "unavailable");
    }

    #[test]
    fn garbage_is_malformed() {
        for garbage in
            ["", "x", "[]", "{}", "{\"choices\": [{\"delta\": {\"content\": 7}}]}", "{\"choices\": 1}"]
        {
            let error = OpenAiDecoder.event(garbage).expect_err(garbage);
            assert_eq!(error.outcome(), "malformed", "{garbage}");
        }
    }
}
