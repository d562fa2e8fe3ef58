//! Checks of JSON schemas.

use crate::marker;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A schema to check.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct CheckSchema {
    pub schema: Value,
    /// A model of this host; the default is the host's default model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
}

/// Whether outputs can follow a schema, and what its author may want to know.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SchemaCheck {
    #[schema(inline)]
    pub object: marker::SchemaCheck,
    /// Whether every output satisfies the schema: while it is generated, or by a check of complete values.
    pub enforced: bool,
    pub notes: Vec<SchemaNote>,
    /// Why the schema is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub error: Option<SchemaError>,
}

/// A note on a schema.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SchemaNote {
    /// `warning` for a likely mistake, `checked` for values that a mask cannot enforce token by token.
    pub kind: String,
    /// The place of the values in the output, such as `/items/*/name`.
    #[schema(required)]
    pub path: Option<String>,
    /// The keywords of the schema of the values.
    pub keywords: Vec<String>,
    pub message: String,
}

/// Why a schema is refused.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct SchemaError {
    pub message: String,
}
