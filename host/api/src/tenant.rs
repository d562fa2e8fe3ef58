//! Tenants.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A tenant that has valid API keys or sessions.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Tenant {
    #[schema(inline)]
    pub object: marker::Tenant,
    pub name: String,
    /// Number of API keys that were not revoked.
    pub keys: u64,
    /// Number of sessions, of all agents.
    pub sessions: u64,
}

/// The numbers of things that were deleted with a tenant.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DeletedTenant {
    #[schema(inline)]
    pub object: marker::DeletedTenant,
    pub name: String,
    /// Number of API keys.
    pub keys: u64,
    pub sessions: u64,
    pub batches: u64,
    pub files: u64,
    /// Number of stored responses that belonged to no session.
    pub responses: u64,
    pub events: u64,
    /// Number of records in the log of requests that belonged to no session.
    pub requests: u64,
    /// Number of KV pages that were on disk.
    pub kv_pages: u64,
    /// Number of rows of usage; 0 if it was kept.
    pub usage: u64,
}
