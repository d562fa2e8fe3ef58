//! Files of clients, in OpenAI's shape.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A file. The results of a batch are files, too.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ClientFile {
    pub id: String,
    #[schema(inline)]
    pub object: marker::File,
    /// Size of the content in bytes.
    pub bytes: u64,
    /// Time in seconds since 1970.
    pub created_at: u64,
    /// Time in seconds since 1970 at which the file is deleted.
    pub expires_at: u64,
    pub filename: String,
    /// `batch` for the requests of a batch, and `batch_output` for its results.
    pub purpose: String,
    /// `processed`.
    pub status: String,
}

/// A file to upload.
#[derive(Debug, Clone, ToSchema)]
pub struct UploadFile {
    /// The file, with its name: one JSON object per line, each a request of a batch.
    #[schema(format = Binary, value_type = String)]
    pub file: Vec<u8>,
    /// `batch`.
    pub purpose: String,
    /// Time in seconds until the file is deleted, 3600 to 2592000; 30 days by default.
    #[schema(rename = "expires_after[seconds]", minimum = 3600, maximum = 2_592_000)]
    pub expires_after_seconds: Option<u64>,
    /// `created_at`.
    #[schema(rename = "expires_after[anchor]")]
    pub expires_after_anchor: Option<String>,
}

/// A file that was deleted.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DeletedFile {
    pub id: String,
    #[schema(inline)]
    pub object: marker::File,
    pub deleted: bool,
}
