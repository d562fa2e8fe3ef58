//! API keys.

use crate::{marker, words::words};
use serde::{Deserialize, Serialize};
use std::num::NonZeroU32;
use utoipa::ToSchema;

/// The properties of an API key.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Key {
    #[schema(inline)]
    pub object: marker::ApiKey,
    pub id: String,
    pub tenant: String,
    pub role: Role,
    /// Agents that the key may use; `null` means all agents, and the models.
    #[schema(required)]
    pub agents: Option<Vec<String>>,
    /// A label for people.
    pub name: String,
    pub created_at_ms: u64,
    #[schema(required)]
    pub expires_at_ms: Option<u64>,
    #[schema(required)]
    pub revoked_at_ms: Option<u64>,
    /// Maximum number of requests per minute; `null` means that only the limit of its tenant applies.
    #[schema(value_type = Option<u32>, minimum = 1, required)]
    pub requests_per_minute: Option<NonZeroU32>,
    /// Whether the key may read what was said in requests to models.
    #[serde(default)]
    pub bodies: bool,
    /// Precise to the day.
    #[schema(required)]
    pub last_used_at_ms: Option<u64>,
    /// The key itself, which only the response that creates it contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub key: Option<String>,
    /// Likely mistakes, such as agents that do not exist, which only the response that creates the key contains.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// An API key to create.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewKey {
    pub tenant: String,
    pub role: Role,
    /// The agents that the key is for; the default is all agents, and the models.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub agents: Option<Vec<String>>,
    /// A label for people.
    #[serde(default)]
    pub name: String,
    /// The lifetime of the key; by default it does not expire.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires_in_s: Option<u64>,
    /// Maximum number of requests per minute; by default only the tenant's limit applies.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<u32>, minimum = 1)]
    pub requests_per_minute: Option<NonZeroU32>,
    /// Whether the key may read what was said in requests to models. No role includes it, and only a key that may do so can
    /// create another one.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub bodies: bool,
}

words! {
    /// The role of a key. Each of `read`, `invoke` and `admin` includes the ones before it; metrics are for `metrics` and `admin`.
    pub enum Role {
        Metrics = "metrics",
        Read = "read",
        Invoke = "invoke",
        Admin = "admin",
    }
}

/// A sign-in to the console.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SignIn {
    /// The API key.
    pub key: String,
}

/// The caller of a request, as the host sees it.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CallerInfo {
    #[schema(inline)]
    pub object: marker::Caller,
    pub tenant: String,
    pub role: Role,
    /// Agents that the caller may use; `null` means all agents, and the models.
    #[schema(required)]
    pub agents: Option<Vec<String>>,
    /// Id of the key; `null` where the host requires no key.
    #[schema(required)]
    pub key: Option<String>,
    /// Whether the host requires keys.
    pub keys_required: bool,
    /// Whether the caller may read what was said in requests to models.
    pub reads_bodies: bool,
    /// Version of the host.
    pub version: String,
}
