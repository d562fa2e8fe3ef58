//! Reads the requests of a batch: a file with one JSON object per line. Every error names its line.

use super::{
    endpoint::Endpoint,
    line::{Chains, queued, queued_response, queued_text},
};
use crate::{
    ApiError,
    body::parse_fields,
    openai::{
        chat_request::ChatBody, completion_request::CompletionBody, fields::Fields,
        responses::request::ResponseRequest,
    },
};
use serde::{Deserialize, Serialize};
use skep_engine::Sampling;
use skep_runtime::BatchItem;
use std::collections::{BTreeSet, HashSet};

/// The form of a chat completion in OpenAI's schema, stored with an item of a batch.
pub(crate) const OPENAI: &str = "openai";
/// The form of a text completion.
pub(super) const COMPLETION: &str = "completion";
const MAX_CUSTOM_ID_BYTES: usize = 256;
/// Maximum number of errors that are reported, and of characters of each.
const MAX_ERRORS: usize = 100;
const MAX_ERROR_CHARS: usize = 500;

/// An error in the file of a batch.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct LineError {
    pub code: String,
    /// The line, counted from 1; without it, the error is in the whole file.
    pub line: Option<u64>,
    pub message: String,
    /// The field of the line.
    pub param: Option<String>,
}

/// A model that the requests of a batch name.
#[derive(Clone, Debug)]
pub(crate) struct Target {
    /// The name under which the batch is queued.
    pub name: String,
    pub is_agent: bool,
    pub defaults: Sampling,
}

/// The requests of a batch.
#[derive(Debug)]
pub(crate) struct Requests {
    pub target: Target,
    pub items: Vec<BatchItem>,
    /// Names of fields that change nothing here.
    pub ignored: BTreeSet<String>,
}

/// The terms of the requests of a batch.
pub(crate) struct Terms {
    pub endpoint: Endpoint,
    pub tenant: String,
    /// Maximum number of requests.
    pub max_items: usize,
    pub chains: Chains,
}

/// Returns the ids of the responses that the requests of a file continue. Lines that are not valid name none.
pub(crate) fn continued(file: &[u8]) -> BTreeSet<String> {
    #[derive(Deserialize)]
    struct Line {
        body: Body,
    }
    #[derive(Deserialize)]
    struct Body {
        previous_response_id: Option<String>,
    }
    let lines =
        file.split(|byte| *byte == b'\n').filter_map(|line| serde_json::from_slice::<Line>(line).ok());
    lines.filter_map(|line| line.body.previous_response_id).collect()
}

/// Reads the file of a batch. `find` finds a model by the name that a request has.
pub(crate) fn read(
    file: &[u8],
    terms: &Terms,
    find: impl Fn(Option<&str>) -> Result<Target, ApiError>,
) -> Result<Requests, Vec<LineError>> {
    let max_items = terms.max_items;
    let mut reader = Reader { find, terms, target: None, known: HashSet::new(), ignored: BTreeSet::new() };
    let (mut items, mut errors) = (Vec::new(), Vec::new());
    let lines = file.split(|byte| *byte == b'\n').enumerate();
    for (index, line) in lines.filter(|(_, line)| !line.trim_ascii().is_empty()) {
        if items.len() == max_items {
            let message =
                format!("the file has more than {max_items} requests; split it into several batches");
            errors.push(of_file("too_many_requests", message));
            break;
        }
        match reader.item(line) {
            Ok(item) => items.push(item),
            Err(error) => {
                let ApiError { code, message, param, .. } = error;
                let line = index as u64 + 1;
                // A message may quote the file.
                let message = shortened(&format!("line {line}: {message}"));
                let param = param.as_deref().map(shortened);
                errors.push(LineError { code: code.to_owned(), line: Some(line), message, param });
            }
        }
        if errors.len() == MAX_ERRORS {
            break;
        }
    }
    if errors.is_empty() && items.is_empty() {
        let message = "the file is empty; it must have a request in each line".to_owned();
        errors.push(of_file("empty_file", message));
    }
    match reader.target {
        Some(target) if errors.is_empty() => Ok(Requests { target, items, ignored: reader.ignored }),
        _ => Err(errors),
    }
}

fn shortened(text: &str) -> String {
    text.chars().take(MAX_ERROR_CHARS).collect()
}

fn of_file(code: &str, message: String) -> LineError {
    LineError { code: code.to_owned(), line: None, message, param: None }
}

struct Reader<'a, F> {
    find: F,
    terms: &'a Terms,
    /// The model that the first request names, with the name that it gives it.
    target: Option<Target>,
    /// The names of the requests so far.
    known: HashSet<String>,
    ignored: BTreeSet<String>,
}

impl<F: Fn(Option<&str>) -> Result<Target, ApiError>> Reader<'_, F> {
    fn item(&mut self, line: &[u8]) -> Result<BatchItem, ApiError> {
        let mut fields = parse_fields(line)?;
        let custom_id: String = fields.take_required("custom_id")?;
        if !(1..=MAX_CUSTOM_ID_BYTES).contains(&custom_id.len()) {
            let message = format!("custom_id must have 1 to {MAX_CUSTOM_ID_BYTES} bytes");
            return Err(ApiError::parameter("custom_id", message));
        }
        if !self.known.insert(custom_id.clone()) {
            let message = format!("custom_id {custom_id:?} is already used by an earlier request");
            return Err(ApiError {
                code: "duplicate_custom_id",
                ..ApiError::parameter("custom_id", message)
            });
        }
        for (field, only) in [("method", "POST"), ("url", self.terms.endpoint.path())] {
            let given: String = fields.take_required(field)?;
            if given != only {
                let message = format!("{field} is {given:?}; the requests of this batch must have {only:?}");
                return Err(ApiError::parameter(field, message));
            }
        }
        let body: Fields = fields.take_required("body")?;
        self.ignored.extend(fields.into_ignored());
        let (item, ignored) = self.request(body).map_err(in_body)?;
        self.ignored.extend(ignored.into_iter().map(|name| format!("body.{name}")));
        Ok(BatchItem { reference: Some(custom_id), ..item })
    }

    fn request(&mut self, body: Fields) -> Result<(BatchItem, Vec<String>), ApiError> {
        let item =
            |request, form: &str| BatchItem { request, form: form.to_owned(), reference: None, keep: None };
        match self.terms.endpoint {
            Endpoint::ChatCompletions => {
                let body = ChatBody::read(body)?;
                let target = self.target(body.parameters.model.as_deref())?;
                let request = queued(&body, target.is_agent, &target.defaults)?;
                let ignored = if target.is_agent { body.ignored_by_agent() } else { body.ignored };
                Ok((item(request, OPENAI), ignored))
            }
            Endpoint::Completions => {
                let body = CompletionBody::read(body)?;
                let target = self.target(body.parameters.model.as_deref())?;
                Ok((item(queued_text(&body, target)?, COMPLETION), body.ignored))
            }
            Endpoint::Responses => {
                let request = ResponseRequest::read(body)?;
                let (tenant, chains) = (self.terms.tenant.as_str(), &self.terms.chains);
                let target = self.target(request.parameters.model.as_deref())?;
                Ok((queued_response(&request, target, (tenant, chains))?, request.ignored))
            }
        }
    }

    /// Returns the model of a request, which is that of all others.
    fn target(&mut self, model: Option<&str>) -> Result<&Target, ApiError> {
        let target =
            (self.find)(model).map_err(|error| ApiError { param: Some("model".to_owned()), ..error })?;
        match &self.target {
            Some(first) if first.name != target.name => {
                let message = format!(
                    "the model is {:?}, and the first request has {:?}; all requests of a batch must have one model",
                    target.name, first.name
                );
                Err(ApiError { code: "mismatched_model", ..ApiError::parameter("model", message) })
            }
            _ => Ok(self.target.get_or_insert(target)),
        }
    }
}

/// Makes the `param` of an error a path into the line.
fn in_body(error: ApiError) -> ApiError {
    let param = match &error.param {
        Some(param) => format!("body.{param}"),
        None => "body".to_owned(),
    };
    ApiError { param: Some(param), ..error }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::StatusCode;
    use serde_json::{Value, json};
    use skep_runtime::{BatchPrompt, BatchRequest};

    fn find(name: Option<&str>) -> Result<Target, ApiError> {
        match name {
            Some(name @ ("m" | "n")) => {
                Ok(Target { name: name.to_owned(), is_agent: false, defaults: Sampling::default() })
            }
            other => {
                let message = format!("model {other:?} does not exist");
                Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message))
            }
        }
    }

    fn line(id: &str, more: Value) -> Value {
        let mut body = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}]});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        json!({"custom_id": id, "method": "POST", "url": Endpoint::ChatCompletions.path(), "body": body})
    }

    fn terms(endpoint: Endpoint) -> Terms {
        Terms { endpoint, tenant: "t".into(), max_items: 3, chains: Chains::new() }
    }

    fn file(lines: &[Value]) -> Vec<u8> {
        lines.iter().map(|line| format!("{line}\n")).collect::<String>().into_bytes()
    }

    fn errors(file: &[u8]) -> Vec<(Option<u64>, String, Option<String>)> {
        let errors = read(file, &terms(Endpoint::ChatCompletions), find).unwrap_err();
        errors.into_iter().map(|error| (error.line, error.code, error.param)).collect()
    }

    #[test]
    fn requests_are_read_in_order_and_ignored_fields_are_named() {
        let mut odd = line("b", json!({"store": true}));
        odd["priority"] = json!(1);
        let mut text = file(&[line("a", json!({"max_tokens": 5}))]);
        text.extend(b"\r\n\n");
        text.extend(file(&[odd]));
        let Requests { target, items, ignored } =
            read(&text, &terms(Endpoint::ChatCompletions), find).unwrap();
        assert_eq!(target.name, "m");
        let names: Vec<_> = items.iter().map(|item| item.reference.as_deref().unwrap()).collect();
        assert_eq!(names, ["a", "b"]);
        assert_eq!(ignored.into_iter().collect::<Vec<_>>(), ["body.store", "priority"]);
        let BatchRequest::Chat { options, .. } = &items[0].request else { panic!("{items:?}") };
        assert_eq!(options.max_tokens, Some(5));
    }

    #[test]
    fn every_error_names_its_line_and_field() {
        let mut other_url = line("b", json!({}));
        other_url["url"] = json!("/v1/embeddings");
        let mut get = line("c", json!({}));
        get["method"] = json!("GET");
        let mut nameless = line("d", json!({}));
        nameless.as_object_mut().unwrap().remove("custom_id");
        let lines = [
            line("a", json!({})),
            json!([1]),
            other_url,
            get,
            nameless,
            line("a", json!({})),
            line("e", json!({"model": "n"})),
            line("f", json!({"model": "none"})),
            line("g", json!({"stream": true})),
            line("h", json!({"n": 17})),
            line("i", json!({"logprobs": true, "top_logprobs": 21})),
            line("j", json!({"temperature": 3})),
            line("k", json!({"audio": {}})),
        ];
        let mut text = file(&lines);
        text.extend(b"{\"custom_id\": ");
        let found = errors(&text);
        let expected = [
            (2, "invalid_json", None),
            (3, "invalid_value", Some("url")),
            (4, "invalid_value", Some("method")),
            (5, "invalid_value", Some("custom_id")),
            (6, "duplicate_custom_id", Some("custom_id")),
            (7, "mismatched_model", Some("body.model")),
            (8, "model_not_found", Some("body.model")),
            (9, "invalid_value", Some("body.stream")),
            (10, "invalid_value", Some("body.n")),
            (11, "invalid_value", Some("body.top_logprobs")),
            (12, "invalid_value", Some("body.temperature")),
            (13, "invalid_value", Some("body.audio")),
            (14, "invalid_json", None),
        ];
        let expected: Vec<_> = expected
            .into_iter()
            .map(|(line, code, param)| (Some(line), code.to_owned(), param.map(str::to_owned)))
            .collect();
        assert_eq!(found, expected);
    }

    #[test]
    fn each_endpoint_reads_requests_of_its_own() {
        let line = |path: &str, body: Value| {
            file(&[json!({"custom_id": "a", "method": "POST", "url": path, "body": body})])
        };
        let chat = json!({"model": "m", "messages": [{"role": "user", "content": "hi"}], "n": 3, "logprobs": true,
                          "prompt_cache_key": "k"});
        let found =
            read(&line("/v1/chat/completions", chat), &terms(Endpoint::ChatCompletions), find).unwrap();
        let BatchRequest::Chat { options, choices, .. } = &found.items[0].request else {
            panic!("{found:?}")
        };
        assert_eq!((*choices, options.top_logprobs), (3, Some(0)));
        assert_eq!(options.affinity.session.as_deref(), Some("k"));
        let text =
            json!({"model": "m", "prompt": ["a", "b"], "n": 2, "logprobs": 1, "echo": true, "suffix": ""});
        let found = read(&line("/v1/completions", text), &terms(Endpoint::Completions), find).unwrap();
        let BatchRequest::Texts { prompts, options, choices, echo } = &found.items[0].request else {
            panic!("{found:?}")
        };
        assert_eq!((prompts.len(), *choices, *echo, options.max_tokens), (2, 2, true, Some(16)));
        assert!(matches!(&prompts[1], BatchPrompt::Text(text) if text == "b"));
        let response = json!({"model": "m", "input": "hi", "instructions": "brief", "truncation": "auto"});
        let found = read(&line("/v1/responses", response), &terms(Endpoint::Responses), find).unwrap();
        let BatchRequest::Chat { messages, options, .. } = &found.items[0].request else {
            panic!("{found:?}")
        };
        assert_eq!((messages.len(), options.drops_oldest), (2, true));
        let keep = found.items[0].keep.as_ref().unwrap();
        assert!(keep.id.starts_with("resp_") && keep.thread == keep.id && keep.principal == "t");
        for (endpoint, path, body, param) in [
            (Endpoint::Completions, "/v1/completions", json!({"model": "m", "prompt": ""}), "body.prompt"),
            (Endpoint::Completions, "/v1/completions", json!({"model": "m", "prompt": [[]]}), "body.prompt"),
            (
                Endpoint::Completions,
                "/v1/completions",
                json!({"model": "m", "prompt": "a", "logprobs": 21}),
                "body.logprobs",
            ),
            (
                Endpoint::Completions,
                "/v1/completions",
                json!({"model": "m", "prompt": vec!["a"; 65]}),
                "body.prompt",
            ),
            (
                Endpoint::Responses,
                "/v1/responses",
                json!({"model": "m", "input": "a", "background": true}),
                "body.background",
            ),
            (
                Endpoint::Responses,
                "/v1/responses",
                json!({"model": "m", "input": "a", "stream": true}),
                "body.stream",
            ),
            (
                Endpoint::Responses,
                "/v1/responses",
                json!({"model": "m", "input": "a", "previous_response_id": "resp_1"}),
                "body.previous_response_id",
            ),
            (
                Endpoint::Responses,
                "/v1/responses",
                json!({"model": "m", "input": [{"type": "item_reference", "id": "msg_1"}]}),
                "body.input[0]",
            ),
        ] {
            let errors = read(&line(path, body), &terms(endpoint), find).unwrap_err();
            assert_eq!(errors[0].param.as_deref(), Some(param), "{}", errors[0].message);
        }
        let two = [
            r#"{"body": {"previous_response_id": "resp_a"}}"#,
            "{",
            r#"{"body": {"previous_response_id": "resp_b"}}"#,
        ];
        assert_eq!(continued(two.join("\n").as_bytes()).len(), 2);
    }

    #[test]
    fn an_empty_file_and_too_many_requests_are_errors_of_the_file() {
        assert_eq!(errors(b"\n \n"), [(None, "empty_file".to_owned(), None)]);
        let many: Vec<Value> = (0..4).map(|index| line(&index.to_string(), json!({}))).collect();
        assert_eq!(errors(&file(&many)), [(None, "too_many_requests".to_owned(), None)]);
        let wrong: Vec<u8> = b"x\n".repeat(MAX_ERRORS + 50);
        assert_eq!(errors(&wrong).len(), MAX_ERRORS);
        let mut long = line("a", json!({}));
        long["url"] = json!("x".repeat(10_000));
        let errors = read(&file(&[long]), &terms(Endpoint::ChatCompletions), find).unwrap_err();
        assert_eq!(errors[0].message.chars().count(), MAX_ERROR_CHARS);
    }
}
