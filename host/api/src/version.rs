//! Versions of an agent.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A version of an agent that can be activated.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AgentVersion {
    #[schema(inline)]
    pub object: marker::Version,
    /// Number of the version; 1 is the agent's first deployment.
    pub version: u64,
    /// Whether this is the active version.
    pub in_force: bool,
    /// SHA-256 of the component, in hexadecimal digits.
    pub digest: String,
    pub deployed_at_ms: u64,
    /// The key or the tenant that deployed the version.
    pub deployed_by: String,
    /// The text of the version's `agent.toml`.
    pub manifest: String,
}

/// A request to activate a version.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rollback {
    /// The version to activate; the default is the one before the active version.
    pub version: Option<u64>,
}
