//! Converts batches: requests from `{"requests": […]}`, and responses to `{"responses": […]}`.

use super::{
    failure, native,
    request::{RunRequest, Schema},
};
use crate::{
    ApiError,
    batch::{line::queued, request::OPENAI},
    openai::{Envelope, chat_response::whole_answer, fields::Fields, usage},
};
use serde_json::{Value, json};
use skep_api::{AiAnswer, AiBatchAnswer, AiBatchAnswers, BatchItems, QueuedBatch};
use skep_engine::{EngineError, Sampling, Usage};
use skep_runtime::{
    BatchAnswer, BatchItem, BatchOutcome, BatchPhase, BatchResult, BatchResults, BatchStatus, RuntimeError,
};

/// The size that a batch must stay under, whatever the limit of other bodies.
pub(crate) const MAX_BATCH_BYTES: usize = 10_000_000;

/// The form of an answer, stored with an item of a batch.
const NATIVE: &str = "native";
const NATIVE_JSON: &str = "native-json";

/// Adds the position of a request in its batch to an error, whose `param` becomes a path into `requests`.
pub(crate) fn at(index: usize, error: ApiError) -> ApiError {
    let param = match &error.param {
        Some(param) => format!("requests[{index}].{param}"),
        None => format!("requests[{index}]"),
    };
    ApiError { param: Some(param), ..error }
}

/// Reads one request of a batch.
pub(crate) fn item(
    mut fields: Fields,
    is_for_agent: bool,
    defaults: &Sampling,
) -> Result<BatchItem, ApiError> {
    let reference = fields.take("external_reference")?;
    let RunRequest { schema, body } = RunRequest::read(fields)?;
    let form = match schema {
        Schema::OpenAi => OPENAI,
        Schema::Native if body.wants_json() => NATIVE_JSON,
        Schema::Native => NATIVE,
    };
    let request = queued(&body, is_for_agent, defaults)?;
    Ok(BatchItem { request, form: form.to_owned(), reference, keep: None })
}

/// Returns the status of a batch that is not done.
pub(crate) fn standing(status: &BatchStatus) -> QueuedBatch {
    QueuedBatch { status: phase(status), request_id: status.id.clone(), model: status.model.clone() }
}

/// Returns the detailed status of a batch, without its results.
pub(crate) fn detail(status: &BatchStatus) -> skep_api::BatchStatus {
    let QueuedBatch { status: phase, request_id, model } = standing(status);
    let items = &status.items;
    skep_api::BatchStatus {
        status: phase,
        request_id,
        model,
        created_at_ms: status.created_at_ms,
        ended_at_ms: match status.phase {
            BatchPhase::Ended { at_ms, .. } => Some(at_ms),
            _ => None,
        },
        items: BatchItems {
            total: items.total(),
            waiting: items.waiting,
            running: items.running,
            done: items.done,
            failed: items.failed,
            cancelled: items.cancelled,
        },
    }
}

fn phase(status: &BatchStatus) -> skep_api::BatchPhase {
    match status.phase {
        BatchPhase::Queued => skep_api::BatchPhase::Queued,
        BatchPhase::Running => skep_api::BatchPhase::Running,
        BatchPhase::Ended { cancelled: true, .. } => skep_api::BatchPhase::Cancelled,
        BatchPhase::Ended { .. } => skep_api::BatchPhase::Complete,
    }
}

/// Returns the results of a batch that is done.
pub(crate) fn responses(results: BatchResults) -> AiBatchAnswers {
    let mut tokens = Usage::default();
    let model = results.status.model;
    let responses = results.items.into_iter().map(|item| response(&model, item, &mut tokens)).collect();
    AiBatchAnswers { responses, usage: usage(&tokens) }
}

fn response(model: &str, item: BatchResult, usage: &mut Usage) -> AiBatchAnswer {
    let outcome = match item.outcome {
        BatchOutcome::Done(answer) => {
            usage.add(&answer.total_usage());
            result(model, &answer)
        }
        BatchOutcome::Failed { code, message } => {
            Err(ApiError::from(RuntimeError::TurnFailed { code, message }))
        }
        BatchOutcome::Cancelled => Err(ApiError::from(EngineError::Cancelled)),
    };
    let (result, error) = match outcome {
        Ok(result) => (Some(result), None),
        Err(error) => (None, Some(failure::described(&error))),
    };
    AiBatchAnswer {
        id: item.index,
        success: error.is_none(),
        external_reference: item.reference,
        result,
        error,
    }
}

fn result(model: &str, answer: &BatchAnswer) -> Result<Value, ApiError> {
    let BatchAnswer { form, text, data, tool_calls, cut_off, usage, .. } = answer;
    if form == OPENAI {
        return Ok(json!(whole_answer(&Envelope::new("chatcmpl", model), answer)));
    }
    if *cut_off {
        return Err(EngineError::Truncated.into());
    }
    let data = data.as_ref().map(skep_runtime::Json::value);
    Ok(json!(AiAnswer { data, ..native::result(text, tool_calls, usage, form == NATIVE_JSON) }))
}
