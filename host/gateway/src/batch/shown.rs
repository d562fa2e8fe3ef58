//! Batches in OpenAI's shape: what is stored with a batch, and how it is shown.

use super::{answer::ResultFile, endpoint::Endpoint, request::LineError};
use crate::ApiError;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use skep_api::{Batch, BatchCounts, BatchError, BatchErrors, BatchState, BatchTimes, marker};
use skep_runtime::{BatchPhase, BatchStatus};
use std::time::Duration;

/// The only completion window.
pub(crate) const WINDOW: &str = "24h";
/// The duration of [`WINDOW`].
pub(crate) const WINDOW_TIME: Duration = Duration::from_secs(24 * 3600);
const PREFIX: &str = "batch_";
const RESULT_FILES: [(ResultFile, &str, &str); 2] =
    [(ResultFile::Output, "file-output-", "output"), (ResultFile::Errors, "file-errors-", "errors")];

/// The part of a batch that is stored with it and that only this API knows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Details {
    pub input_file_id: String,
    #[serde(default)]
    pub endpoint: Endpoint,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<Value>,
    /// Errors in the file; such a batch has no requests.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<LineError>,
    #[serde(default)]
    pub output: ResultDetails,
    #[serde(default)]
    pub error_file: ResultDetails,
}

/// The part of a batch that concerns one of its result files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ResultDetails {
    /// Size of the file, once somebody has asked for it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    #[serde(default)]
    pub deleted: bool,
}

impl Details {
    /// Reads the details of a batch; a batch of another API has none.
    pub(crate) fn of(status: &BatchStatus) -> Result<Option<Details>, ApiError> {
        let details = status.details.as_deref().map(serde_json::from_str).transpose();
        details.map_err(|_| ApiError::internal("the stored details of a batch are unreadable"))
    }

    /// Returns the details after a result file was deleted.
    pub(crate) fn without(mut self, file: ResultFile) -> Self {
        match file {
            ResultFile::Output => self.output.deleted = true,
            ResultFile::Errors => self.error_file.deleted = true,
        }
        self
    }

    pub(crate) fn result(&self, file: ResultFile) -> ResultDetails {
        match file {
            ResultFile::Output => self.output,
            ResultFile::Errors => self.error_file,
        }
    }
}

/// Returns the name of the member of [`Details`] for a result file.
pub(crate) fn member(file: ResultFile) -> &'static str {
    match file {
        ResultFile::Output => "output",
        ResultFile::Errors => "error_file",
    }
}

/// Returns the host's id of a batch, given the client's.
pub(crate) fn host_id(id: &str) -> &str {
    id.strip_prefix(PREFIX).unwrap_or(id)
}

/// Returns the id of a result file of a batch.
pub(crate) fn file_id(batch: &str, file: ResultFile) -> String {
    let prefix = RESULT_FILES.iter().find(|(known, ..)| *known == file).map_or("", |(_, prefix, _)| prefix);
    format!("{prefix}{batch}")
}

/// Returns the file name of a result file of a batch.
pub(crate) fn file_name(batch: &str, file: ResultFile) -> String {
    let word = RESULT_FILES.iter().find(|(known, ..)| *known == file).map_or("", |(.., word)| word);
    format!("{PREFIX}{batch}_{word}.jsonl")
}

/// Returns the batch and the kind of a result file, if an id is that of one.
pub(crate) fn result_file(id: &str) -> Option<(&str, ResultFile)> {
    RESULT_FILES.iter().find_map(|(file, prefix, _)| Some((id.strip_prefix(prefix)?, *file)))
}

/// Returns whether a batch has a result file.
pub(crate) fn has_result(status: &BatchStatus, details: &Details, file: ResultFile) -> bool {
    let lines = match file {
        ResultFile::Output => status.items.done,
        ResultFile::Errors => unanswered(status),
    };
    matches!(status.phase, BatchPhase::Ended { .. }) && lines > 0 && !details.result(file).deleted
}

fn unanswered(status: &BatchStatus) -> u64 {
    status.items.failed + status.items.cancelled
}

/// Returns a batch as clients see it.
pub(crate) fn shown(status: &BatchStatus, details: Details) -> Batch {
    let ended_s = match status.phase {
        BatchPhase::Ended { at_ms, .. } => Some(at_ms / 1000),
        _ => None,
    };
    let state = match status.phase {
        BatchPhase::Ended { .. } if !details.errors.is_empty() => BatchState::Failed,
        BatchPhase::Ended { .. } if status.expired => BatchState::Expired,
        BatchPhase::Ended { cancelled: true, .. } => BatchState::Cancelled,
        BatchPhase::Ended { .. } => BatchState::Completed,
        _ if status.cancelled => BatchState::Cancelling,
        _ => BatchState::InProgress,
    };
    let ended_as = |word: BatchState| ended_s.filter(|_| state == word);
    let id_of = |file| has_result(status, &details, file).then(|| file_id(&status.id, file));
    Batch {
        id: format!("{PREFIX}{}", status.id),
        object: marker::Batch,
        endpoint: details.endpoint.path().to_owned(),
        model: (!status.model.is_empty()).then(|| status.model.clone()),
        output_file_id: id_of(ResultFile::Output),
        error_file_id: id_of(ResultFile::Errors),
        completion_window: WINDOW.to_owned(),
        times: BatchTimes {
            created_at: status.created_at_ms / 1000,
            in_progress_at: status.started_at_ms.map(|at_ms| at_ms / 1000),
            expires_at: status.expires_at_ms.map(|at_ms| at_ms / 1000),
            completed_at: ended_as(BatchState::Completed),
            failed_at: ended_as(BatchState::Failed),
            expired_at: ended_as(BatchState::Expired),
            cancelled_at: ended_as(BatchState::Cancelled),
        },
        status: state,
        request_counts: BatchCounts {
            total: status.items.total(),
            completed: status.items.done,
            failed: unanswered(status),
        },
        input_file_id: details.input_file_id,
        metadata: details.metadata,
        errors: (!details.errors.is_empty()).then(|| BatchErrors {
            object: marker::List,
            data: details.errors.into_iter().map(error).collect(),
        }),
    }
}

fn error(LineError { code, line, message, param }: LineError) -> BatchError {
    BatchError { code, line, message, param }
}
