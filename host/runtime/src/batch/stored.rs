//! Conversion of batches to and from their stored form.

use super::{BatchAnswer, BatchItem, BatchOutcome, BatchPhase, BatchRequest, BatchResult, BatchStatus};
use crate::{NewResponse, RuntimeError, error::known_code, session::StoredFailure};
use serde::{Deserialize, Serialize};
use skep_store::{BatchRow, ItemRow, ItemState, NewItem};

/// A request and the response format of its answer.
#[derive(Serialize, Deserialize)]
pub(super) struct StoredRequest {
    pub(super) form: String,
    pub(super) request: BatchRequest,
    /// Id of the API key that sent the request. Items stored before usage was counted by key lack the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) key: Option<String>,
    /// The session by whose last answer the cached prefix is found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) session: Option<String>,
    /// The response to store with the answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) keep: Option<NewResponse>,
}

impl StoredRequest {
    pub(super) fn decode(body: &[u8]) -> Result<Self, RuntimeError> {
        serde_json::from_slice(body).map_err(|error| unreadable("request", &error))
    }
}

pub(super) fn new_item(item: BatchItem, key: Option<&str>) -> NewItem {
    let BatchItem { request, form, reference, keep } = item;
    let key = key.map(str::to_owned);
    let session = request.session().map(str::to_owned);
    let request = StoredRequest { form, request, key, session, keep };
    let request = serde_json::to_vec(&request).expect("plain data always serializes");
    NewItem { request, reference }
}

pub(super) fn encode_answer(answer: &BatchAnswer) -> Vec<u8> {
    serde_json::to_vec(answer).expect("plain data always serializes")
}

pub(super) fn status(row: &BatchRow, kept_until_ms: Option<u64>) -> BatchStatus {
    BatchStatus {
        id: row.id.clone(),
        model: row.model.clone(),
        created_at_ms: row.created_at_ms,
        started_at_ms: row.started_at_ms,
        expires_at_ms: row.terms.expires_at_ms,
        kept_until_ms,
        cancelled: row.cancelled,
        expired: row.expired,
        details: row.terms.details.clone(),
        phase: match (row.ended_at_ms, row.started_at_ms) {
            (Some(at_ms), _) => BatchPhase::Ended { at_ms, cancelled: row.cancelled },
            (None, Some(_)) => BatchPhase::Running,
            (None, None) => BatchPhase::Queued,
        },
        items: row.items,
    }
}

/// Decodes the result of an item of an ended batch.
pub(super) fn result(row: ItemRow) -> Result<BatchResult, RuntimeError> {
    let outcome = match row.state {
        // The results were deleted.
        ItemState::Done(body) | ItemState::Failed(body) if body.is_empty() => BatchOutcome::Cancelled,
        ItemState::Done(body) => {
            let answer = serde_json::from_slice(&body).map_err(|error| unreadable("answer", &error))?;
            BatchOutcome::Done(Box::new(answer))
        }
        ItemState::Failed(body) => {
            let StoredFailure { code, message } =
                serde_json::from_slice(&body).map_err(|error| unreadable("failure", &error))?;
            BatchOutcome::Failed { code: known_code(&code), message }
        }
        ItemState::Waiting | ItemState::Running | ItemState::Cancelled => BatchOutcome::Cancelled,
    };
    Ok(BatchResult { index: row.position, reference: row.reference, outcome })
}

fn unreadable(what: &str, error: &serde_json::Error) -> RuntimeError {
    RuntimeError::Internal { message: format!("the stored {what} of a batch is unreadable: {error}") }
}
