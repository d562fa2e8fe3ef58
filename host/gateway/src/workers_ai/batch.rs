//! Converts batches: requests from `{"requests": […]}`, and responses to `{"responses": […]}`.

use super::{
    failure, native,
    request::{RunRequest, Schema},
};
use crate::{
    ApiError,
    openai::{chat_response::whole_answer, fields::Fields, usage_json},
};
use serde_json::{Value, json};
use skep_engine::{Affinity, EngineError, Usage};
use skep_runtime::{
    BatchAnswer, BatchItem, BatchOutcome, BatchPhase, BatchRequest, BatchResult, BatchResults, BatchStatus,
    RuntimeError,
};

/// The size that a batch must stay under, whatever the limit of other bodies.
pub(crate) const MAX_BATCH_BYTES: usize = 10_000_000;

/// The form of an answer, stored with an item of a batch.
const NATIVE: &str = "native";
const NATIVE_JSON: &str = "native-json";
const OPENAI: &str = "openai";

/// Adds the position of a request in its batch to an error, whose `param` becomes a path into `requests`.
pub(crate) fn at(index: usize, error: ApiError) -> ApiError {
    let param = match &error.param {
        Some(param) => format!("requests[{index}].{param}"),
        None => format!("requests[{index}]"),
    };
    ApiError { param: Some(param), ..error }
}

/// Reads one request of a batch.
pub(crate) fn item(mut fields: Fields, is_for_agent: bool) -> Result<BatchItem, ApiError> {
    let reference = fields.take("external_reference")?;
    let RunRequest { schema, body } = RunRequest::read(fields)?;
    if body.parameters.streams() {
        return Err(ApiError::parameter(
            "stream",
            "the answers of a batch cannot be streamed; remove `stream`",
        ));
    }
    if body.parameters.choices()? != 1 {
        return Err(ApiError::parameter(
            "n",
            "a request of a batch can have only one choice; send it several times",
        ));
    }
    let form = match schema {
        Schema::OpenAi => OPENAI,
        Schema::Native if body.wants_json() => NATIVE_JSON,
        Schema::Native => NATIVE,
    };
    let request = if is_for_agent {
        body.refuse_for_agent()?;
        BatchRequest::Turn { text: body.last_user_text()?, data: None }
    } else {
        let options = body.options(0, &Affinity::default())?;
        if options.top_logprobs.is_some() {
            return Err(ApiError::parameter("logprobs", "log-probabilities are not supported in a batch"));
        }
        BatchRequest::Chat { messages: body.messages()?, options: Box::new(options) }
    };
    Ok(BatchItem { request, form: form.to_owned(), reference })
}

/// Returns the status of a batch that is not done.
pub(crate) fn standing(status: &BatchStatus) -> Value {
    json!({"status": phase(status), "request_id": status.id, "model": status.model})
}

/// Returns the detailed status of a batch, without its results.
pub(crate) fn detail(status: &BatchStatus) -> Value {
    let mut value = standing(status);
    value["created_at_ms"] = status.created_at_ms.into();
    if let BatchPhase::Ended { at_ms, .. } = status.phase {
        value["ended_at_ms"] = at_ms.into();
    }
    let items = &status.items;
    value["items"] = json!({
        "total": items.total(),
        "waiting": items.waiting,
        "running": items.running,
        "done": items.done,
        "failed": items.failed,
        "cancelled": items.cancelled,
    });
    value
}

fn phase(status: &BatchStatus) -> &'static str {
    match status.phase {
        BatchPhase::Queued => "queued",
        BatchPhase::Running => "running",
        BatchPhase::Ended { cancelled: true, .. } => "cancelled",
        BatchPhase::Ended { .. } => "complete",
    }
}

/// Returns the results of a batch that is done.
pub(crate) fn responses(results: BatchResults) -> Value {
    let mut usage = Usage::default();
    let model = results.status.model;
    let responses: Vec<Value> =
        results.items.into_iter().map(|item| response(&model, item, &mut usage)).collect();
    json!({"responses": responses, "usage": usage_json(&usage)})
}

fn response(model: &str, item: BatchResult, usage: &mut Usage) -> Value {
    let outcome = match item.outcome {
        BatchOutcome::Done(answer) => {
            usage.add(&answer.usage);
            result(model, &answer)
        }
        BatchOutcome::Failed { code, message } => {
            Err(ApiError::from(RuntimeError::TurnFailed { code, message }))
        }
        BatchOutcome::Cancelled => Err(ApiError::from(EngineError::Cancelled)),
    };
    let mut response = json!({"id": item.index, "success": outcome.is_ok()});
    if let Some(reference) = item.reference {
        response["external_reference"] = reference.into();
    }
    match outcome {
        Ok(result) => response["result"] = result,
        Err(error) => response["error"] = failure::error_json(&error),
    }
    response
}

fn result(model: &str, answer: &BatchAnswer) -> Result<Value, ApiError> {
    let BatchAnswer { form, text, data, tool_calls, finish, cut_off, usage } = answer;
    if form == OPENAI {
        return Ok(whole_answer(model, text, tool_calls, *finish, usage));
    }
    if *cut_off {
        return Err(EngineError::Truncated.into());
    }
    let mut result = native::result(text, tool_calls, usage, form == NATIVE_JSON);
    if let Some(data) = data {
        result["data"] = data.value();
    }
    Ok(result)
}
