//! Secrets, which agents can send without seeing them.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A secret without its value.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Secret {
    #[schema(inline)]
    pub object: marker::Secret,
    pub name: String,
    /// The agent that may use the secret; `null` means every agent that is granted it.
    #[schema(required)]
    pub agent: Option<String>,
    /// Origins that the value may be sent to.
    pub hosts: Vec<String>,
    pub updated_at_ms: u64,
}

/// The value of a secret, and where it may be sent.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSecret {
    pub value: String,
    /// Origins that the value may be sent to.
    pub hosts: Vec<String>,
    /// The agent that may use the secret; the default is every agent that is granted it.
    pub agent: Option<String>,
}
