//! Batches in OpenAI's shape.

use crate::{marker, words::words};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A batch of requests.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Batch {
    pub id: String,
    #[schema(inline)]
    pub object: marker::Batch,
    /// The route that the requests are for.
    pub endpoint: String,
    /// The model or agent that answers; a batch whose file has errors has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub model: Option<String>,
    /// Errors in the file of a failed batch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub errors: Option<BatchErrors>,
    pub input_file_id: String,
    pub completion_window: String,
    pub status: BatchState,
    /// The file with the answers, once the batch has ended with any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub output_file_id: Option<String>,
    /// The file with the requests that have no answer, once the batch has ended with any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error_file_id: Option<String>,
    #[serde(flatten)]
    pub times: BatchTimes,
    pub request_counts: BatchCounts,
    /// The client's notes.
    #[serde(default)]
    pub metadata: Option<Value>,
}

words! {
    /// State of a batch.
    pub enum BatchState {
        InProgress = "in_progress",
        Completed = "completed",
        Failed = "failed",
        Expired = "expired",
        Cancelling = "cancelling",
        Cancelled = "cancelled",
    }
}

/// Times of a batch in seconds since 1970.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BatchTimes {
    pub created_at: u64,
    /// The time at which the first request was begun.
    #[serde(default)]
    pub in_progress_at: Option<u64>,
    /// The time at which requests without an answer are given up.
    #[serde(default)]
    pub expires_at: Option<u64>,
    #[serde(default)]
    pub completed_at: Option<u64>,
    #[serde(default)]
    pub failed_at: Option<u64>,
    #[serde(default)]
    pub expired_at: Option<u64>,
    #[serde(default)]
    pub cancelled_at: Option<u64>,
}

/// Numbers of the requests of a batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BatchCounts {
    pub total: u64,
    pub completed: u64,
    /// The failed requests, and those that were cancelled or not begun in time.
    pub failed: u64,
}

/// The errors in the file of a batch.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct BatchErrors {
    #[schema(inline)]
    pub object: marker::List,
    pub data: Vec<BatchError>,
}

/// An error in the file of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct BatchError {
    pub code: String,
    /// The line, counted from 1; an error of the whole file has none.
    #[serde(default)]
    pub line: Option<u64>,
    pub message: String,
    /// The field of the line.
    #[serde(default)]
    pub param: Option<String>,
}

/// A batch to create.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CreateBatch {
    /// A file that was uploaded with the purpose `batch`.
    pub input_file_id: String,
    /// `/v1/chat/completions`, `/v1/completions` or `/v1/responses`.
    pub endpoint: String,
    /// `24h`.
    pub completion_window: String,
    /// Up to 16 texts of up to 512 characters by their names.
    #[serde(default)]
    pub metadata: Option<BTreeMap<String, String>>,
    /// The time for which the result files are kept; the default is 30 days, or less if the host keeps them for less.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub output_expires_after: Option<ExpiresAfter>,
}

/// The time after which a file is deleted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExpiresAfter {
    /// `created_at`: the time counts from the creation of the file.
    pub anchor: String,
    #[schema(minimum = 3600, maximum = 2_592_000)]
    pub seconds: u64,
}
