//! Writes the results of a batch as the lines of its output file and of its error file.

use super::{
    line::ResponseForm,
    request::{COMPLETION, OPENAI},
};
use crate::{
    ApiError,
    openai::{Envelope, chat_response::whole_answer, logprobs, responses::stored},
};
use axum::http::StatusCode;
use serde_json::{Value, json};
use skep_api::CompletionChoice;
use skep_engine::chat::ChatFinish;
use skep_runtime::{
    BatchAnswer, BatchOutcome, BatchPhase, BatchResult, BatchResults, BatchStatus, ResponseEnd,
    ResponsePhase, StoredResponse,
};

/// The two files of a batch that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ResultFile {
    /// The requests that were answered.
    Output,
    /// The requests that failed, were cancelled, or were not begun in time.
    Errors,
}

/// Returns the lines of a file.
pub(crate) fn lines(results: &BatchResults, file: ResultFile) -> String {
    let mut text = String::new();
    for item in &results.items {
        if let Some(line) = line(results, item, file) {
            text.push_str(&line.to_string());
            text.push('\n');
        }
    }
    text
}

/// Returns the error that a stored failure would have been as an answer.
fn failure(code: &'static str, message: &str) -> ApiError {
    let (status, code) = match code {
        "context_overflow" => (StatusCode::BAD_REQUEST, "context_length_exceeded"),
        "invalid_request" => (StatusCode::BAD_REQUEST, "invalid_value"),
        "schema_invalid" => (StatusCode::BAD_REQUEST, code),
        "price_unknown" | "model_not_granted" => (StatusCode::FORBIDDEN, code),
        "model_unknown" => (StatusCode::NOT_FOUND, "model_not_found"),
        "agent_not_found" => (StatusCode::NOT_FOUND, code),
        "schema_unsatisfied" | "truncated" | "tool_failed" | "invalid_message" => {
            (StatusCode::UNPROCESSABLE_ENTITY, code)
        }
        "upstream_refused" | "upstream_cut_off" | "upstream_malformed" => (StatusCode::BAD_GATEWAY, code),
        "upstream_unavailable" => (StatusCode::SERVICE_UNAVAILABLE, code),
        "deadline_exceeded" => (StatusCode::GATEWAY_TIMEOUT, code),
        _ => (StatusCode::INTERNAL_SERVER_ERROR, code),
    };
    ApiError::new(status, code, message)
}

/// Returns the body of an answer in the form that its request had.
fn body(status: &BatchStatus, index: u64, answer: &BatchAnswer) -> Value {
    let ended_at_ms = match status.phase {
        BatchPhase::Ended { at_ms, .. } => at_ms,
        _ => status.created_at_ms,
    };
    let id = format!("{}-{index}", status.id);
    let envelope = |prefix| Envelope::stored(prefix, &id, ended_at_ms / 1000, &status.model);
    match answer.form.as_str() {
        OPENAI => json!(whole_answer(&envelope("chatcmpl"), answer)),
        COMPLETION => json!(envelope("cmpl").text(text_choices(answer), Some(&answer.total_usage()))),
        form => json!(response(form, answer, ended_at_ms)),
    }
}

fn text_choices(answer: &BatchAnswer) -> Vec<CompletionChoice> {
    let choice = |(index, answer): (usize, &BatchAnswer)| CompletionChoice {
        index: index as u32,
        text: answer.text.clone(),
        logprobs: answer.scores.as_deref().map(logprobs::of_text),
        finish_reason: Some(if answer.finish == ChatFinish::Length { "length" } else { "stop" }.to_owned()),
    };
    answer.choices().enumerate().map(choice).collect()
}

/// Returns a response, given its form. One that is unreadable was stored by a later version.
fn response(form: &str, answer: &BatchAnswer, ended_at_ms: u64) -> Option<skep_api::Response> {
    let ResponseForm { id, previous, request } = serde_json::from_str(form).ok()?;
    let end = ResponseEnd::Done(Box::new(answer.clone()));
    let response = StoredResponse {
        id,
        previous,
        thread: String::new(),
        turn: None,
        created_at_ms: ended_at_ms,
        request: request.encode(),
        phase: ResponsePhase::Ended { at_ms: ended_at_ms, end },
    };
    stored::shown(&response).ok()
}

fn line(results: &BatchResults, item: &BatchResult, file: ResultFile) -> Option<Value> {
    let status = &results.status;
    let id = format!("batch_req_{}_{}", status.id, item.index);
    let (response, error) = match (&item.outcome, file) {
        (BatchOutcome::Done(answer), ResultFile::Output) => {
            let body = body(status, item.index, answer);
            (json!({"status_code": 200, "request_id": id, "body": body}), Value::Null)
        }
        (BatchOutcome::Failed { code, message }, ResultFile::Errors) => {
            let error = failure(code, message);
            let body = error.body();
            (json!({"status_code": error.status.as_u16(), "request_id": id, "body": body}), Value::Null)
        }
        (BatchOutcome::Cancelled, ResultFile::Errors) => {
            let (code, message) = match status.expired {
                true => ("batch_expired", "the batch expired before this request was answered"),
                false => ("batch_cancelled", "the batch was cancelled before this request was answered"),
            };
            (Value::Null, json!({"code": code, "message": message}))
        }
        _ => return None,
    };
    Some(json!({"id": id, "custom_id": item.reference, "response": response, "error": error}))
}
