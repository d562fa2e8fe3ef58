//! Errors in OpenAI's shape.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The body of an error.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    pub error: ErrorDetail,
}

/// An error.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorDetail {
    /// Says what is wrong, where, and what would fix it.
    pub message: String,
    /// The kind of the error in OpenAI's terms, such as `invalid_request_error`.
    #[serde(rename = "type", default)]
    #[schema(required)]
    pub kind: String,
    /// The field or the parameter that is wrong.
    #[serde(default)]
    pub param: Option<String>,
    /// The stable name of the error, such as `agent_not_found`.
    #[serde(default)]
    #[schema(required)]
    pub code: String,
}
