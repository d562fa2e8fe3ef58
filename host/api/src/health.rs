//! Health of a host.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The process is alive.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Health {
    #[schema(inline)]
    pub status: marker::Ok,
}

/// The host accepts work.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Readiness {
    #[schema(inline)]
    pub status: marker::Ready,
    pub models: Vec<String>,
    /// Number of agents.
    pub agents: u64,
}
