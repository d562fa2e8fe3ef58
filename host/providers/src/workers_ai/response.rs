//! The events of a streamed answer, the envelope of one that is not, and errors.

use std::time::Duration;

use serde_json::{Map, Value};
use skep_engine::chat::ChatFinish;

use crate::{
    delta::{CallPart, Decoder, Delta},
    failure::{Failure, shortened},
    openai,
};

const DONE: &str = "[DONE]";
const BUSY: u64 = 3040;
const USED_UP: u64 = 3036;
const TIMED_OUT: u64 = 3007;
const UNKNOWN_MODEL: u64 = 5007;
const TOO_LONG: u64 = 5021;

#[derive(Debug)]
pub(crate) struct WorkersAiDecoder {
    /// The format does not say that an answer was cut off, so an answer of this length counts as cut off.
    max_tokens: u64,
    calls: usize,
    completion: u64,
    finished: bool,
}

impl WorkersAiDecoder {
    pub(crate) fn new(max_tokens: Option<u64>) -> Self {
        WorkersAiDecoder {
            max_tokens: max_tokens.unwrap_or(u64::MAX),
            calls: 0,
            completion: 0,
            finished: false,
        }
    }

    /// Reads the fields of an event, or those of the result in an envelope.
    fn fields(&mut self, fields: &Map<String, Value>) -> Result<Vec<Delta>, Failure> {
        if fields.contains_key("choices") {
            let deltas = openai::chunk(fields)?;
            self.finished |= deltas.iter().any(|delta| matches!(delta, Delta::Finish(_)));
            return Ok(deltas);
        }
        let mut deltas = Vec::new();
        let reads = ["response", "tool_calls", "usage"].iter().any(|name| fields.get(*name).is_some());
        if !reads {
            return Err(Failure::malformed("an event has neither `response` nor `tool_calls` nor `usage`"));
        }
        match fields.get("response") {
            None | Some(Value::Null) => {}
            Some(Value::String(text)) if text.is_empty() => {}
            Some(Value::String(text)) => deltas.push(Delta::Text(text.clone())),
            Some(json) => deltas.push(Delta::Text(json.to_string())),
        }
        for call in fields.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            deltas.push(Delta::Call(self.call(call)?));
        }
        if let Some(Value::Object(usage)) = fields.get("usage") {
            let count = openai::usage(usage);
            self.completion = count.completion.unwrap_or(0).into();
            deltas.push(Delta::Count(count));
        }
        Ok(deltas)
    }

    /// Reads a call, which comes whole. Its arguments are JSON or the text of it.
    fn call(&mut self, call: &Value) -> Result<CallPart, Failure> {
        let function = call.get("function").unwrap_or(call);
        let text = |value: &Value, name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
        let name = text(function, "name").ok_or_else(|| Failure::malformed("a tool call has no `name`"))?;
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) => text.clone(),
            Some(arguments) => arguments.to_string(),
            None => String::new(),
        };
        let index = Some(self.calls);
        self.calls += 1;
        Ok(CallPart { index, id: text(call, "id").unwrap_or_default(), name, arguments })
    }

    fn end(&mut self) -> Vec<Delta> {
        let finish = match (self.finished, self.calls) {
            (true, _) => return vec![Delta::Done],
            (false, _) if self.completion >= self.max_tokens => ChatFinish::Length,
            (false, 0) => ChatFinish::Stop,
            (false, _) => ChatFinish::ToolCalls,
        };
        vec![Delta::Finish(finish), Delta::Done]
    }
}

impl Decoder for WorkersAiDecoder {
    fn event(&mut self, data: &str) -> Result<Vec<Delta>, Failure> {
        if data.trim() == DONE {
            return Ok(self.end());
        }
        let fields = parse(data)?;
        refusal(200, &fields, None)?;
        self.fields(&fields)
    }

    fn whole(&mut self, body: &str) -> Result<Vec<Delta>, Failure> {
        let fields = parse(body)?;
        refusal(200, &fields, None)?;
        let Some(Value::Object(result)) = fields.get("result") else {
            return Err(Failure::malformed("the response has no `result`"));
        };
        let mut deltas = self.fields(result)?;
        deltas.extend(self.end());
        Ok(deltas)
    }
}

fn parse(data: &str) -> Result<Map<String, Value>, Failure> {
    serde_json::from_str(data).map_err(|error| {
        let start = shortened(data.chars().take(80).collect());
        Failure::malformed(format!("a response is not a JSON object ({error}): {start:?}"))
    })
}

/// Returns the first error of an envelope.
fn refusal(status: u16, fields: &Map<String, Value>, retry_after: Option<Duration>) -> Result<(), Failure> {
    let failed = fields.get("success") == Some(&Value::Bool(false));
    let error = fields.get("errors").and_then(Value::as_array).and_then(|errors| errors.first());
    if !failed && error.is_none() {
        return Ok(());
    }
    let code = error.and_then(|error| error.get("code")?.as_u64());
    let message = error.and_then(|error| error.get("message")?.as_str()).unwrap_or("no reason was given");
    let status = match code {
        Some(TOO_LONG) => return Err(Failure::TooLong { message: message.to_owned() }),
        Some(BUSY) => 429,
        Some(USED_UP) => 402,
        Some(TIMED_OUT) => 408,
        Some(UNKNOWN_MODEL) => 404,
        Some(5000..=5999) => 400,
        _ if status < 300 => 500,
        _ => status,
    };
    let message = code.map_or_else(|| message.to_owned(), |code| format!("code {code}: {message}"));
    Err(Failure::of_status(status, &message, retry_after))
}

/// Reads the body of a response that is not a success.
pub(crate) fn failure(status: u16, body: &str, retry_after: Option<Duration>) -> Failure {
    let fields: Option<Map<String, Value>> = serde_json::from_str(body).ok();
    match fields.map(|fields| refusal(status, &fields, retry_after)) {
        Some(Err(failure)) => failure,
        _ => Failure::of_status(status, body, retry_after),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::delta::Count;
    use serde_json::json;

    fn decoder() -> WorkersAiDecoder {
        WorkersAiDecoder::new(Some(10))
    }

    #[test]
    fn both_schemas_are_read() {
        let mut native = decoder();
        let events = [
            json!({"response": "Hi"}).to_string(),
            json!({"response": "", "tool_calls": [{"name": "f", "arguments": {"a": 1}}],
                "usage": {"prompt_tokens": 2, "completion_tokens": 3}})
            .to_string(),
            DONE.to_owned(),
        ];
        let deltas: Vec<Delta> =
            events.iter().flat_map(|event| native.event(event).expect("readable")).collect();
        let call = CallPart {
            index: Some(0),
            name: "f".into(),
            arguments: "{\"a\":1}".into(),
            ..CallPart::default()
        };
        let count = Count { prompt: Some(2), completion: Some(3), ..Count::default() };
        assert_eq!(
            deltas,
            [
                Delta::Text("Hi".into()),
                Delta::Call(call),
                Delta::Count(count),
                Delta::Finish(ChatFinish::ToolCalls),
                Delta::Done
            ]
        );
        let body = json!({"success": true, "errors": [], "result": {"choices": [
            {"message": {"content": "{}"}, "finish_reason": "stop"}]}});
        let deltas = decoder().whole(&body.to_string()).expect("readable");
        assert_eq!(deltas, [Delta::Text("{}".into()), Delta::Finish(ChatFinish::Stop), Delta::Done]);
    }

    #[test]
    fn a_json_answer_is_a_text_and_one_at_the_limit_was_cut_off() {
        let body =
            json!({"success": true, "result": {"response": {"a": 1}, "usage": {"completion_tokens": 10}}});
        let deltas = decoder().whole(&body.to_string()).expect("readable");
        assert_eq!(deltas[0], Delta::Text("{\"a\":1}".into()));
        assert_eq!(deltas[2], Delta::Finish(ChatFinish::Length));
    }

    #[test]
    fn codes_keep_their_meaning() {
        for (status, code, outcome) in [
            (429, 3040, "busy"),
            (200, 3040, "busy"),
            (400, 5021, "context_overflow"),
            (400, 5006, "refused"),
            (429, 3036, "unavailable"),
            (500, 9, "unavailable"),
            (401, 10000, "unavailable"),
        ] {
            let body = json!({"success": false, "errors": [{"code": code, "message": "x"}]});
            assert_eq!(failure(status, &body.to_string(), None).outcome(), outcome, "{body}");
        }
        assert_eq!(decoder().event("{}").expect_err("empty").outcome(), "malformed");
    }
}
