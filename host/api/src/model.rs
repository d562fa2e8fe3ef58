//! Models, and agents that can be used as models.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A model, or an agent as `agent:NAME`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Model {
    pub id: String,
    #[schema(inline)]
    pub object: marker::Model,
    /// Time in seconds since 1970.
    pub created: u64,
    /// `skep` for models, and `agent` for agents.
    pub owned_by: String,
    /// Maximum number of tokens; only models have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub context_length: Option<u64>,
    /// The agent's description; only agents have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub description: Option<String>,
}
