//! Reports on the use of models and what it costs.

use crate::{marker, words::words};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

words! {
    /// The property by which usage is grouped.
    pub enum UsageGrouping {
        Agent = "agent",
        Model = "model",
        Tenant = "tenant",
        Day = "day",
        Key = "key",
        Session = "session",
    }
}

/// The use of models over some days in UTC.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct UsageReport {
    #[schema(inline)]
    pub object: marker::UsageReport,
    pub by: UsageGrouping,
    /// The first day, such as `2026-01-01`.
    pub since: String,
    /// The last day, which is included.
    pub until: String,
    pub data: Vec<UsageLine>,
    pub total: UsageLine,
}

/// The use of models by one group.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct UsageLine {
    /// The agent, model, tenant, day, key or session. It is `null` for usage that has none: requests without an agent
    /// or a key, and sessions that are no longer listed one by one.
    #[schema(required)]
    pub name: Option<String>,
    /// The agent of a session. It is missing in other reports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<String>,
    /// Number of requests to models.
    pub requests: u64,
    /// Tokens of prompts, cached ones included.
    pub input_tokens: u64,
    /// Tokens of prompts that were in the prefix cache.
    pub cached_input_tokens: u64,
    /// Tokens of prompts that upstreams wrote to their caches. `cached_input_tokens` does not include them.
    #[serde(default)]
    #[schema(required)]
    pub cache_write_input_tokens: u64,
    pub output_tokens: u64,
    /// The part of these counts that is an estimate, because requests were cut off.
    pub estimated: EstimatedUsage,
    /// The cost by currency. It does not include `unknown_cost`.
    pub cost: Vec<UsageCost>,
    /// Usage whose cost is unknown, because its model had no price on its day, or none for what it wrote to a cache.
    #[schema(required)]
    pub unknown_cost: Option<UnknownCost>,
}

/// Counts of requests that were cut off.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct EstimatedUsage {
    pub requests: u64,
    pub input_tokens: u64,
    pub output_tokens: u64,
}

/// The cost in one currency. Amounts are exact decimal numbers, as strings.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UsageCost {
    /// The currency's code, such as `USD`.
    pub currency: String,
    pub amount: String,
    /// The cached tokens times the difference between the prices of input and cached input.
    pub saved_by_cache: String,
}

/// Usage whose cost is unknown.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnknownCost {
    pub models: Vec<String>,
    pub requests: u64,
    pub input_tokens: u64,
    pub cached_input_tokens: u64,
    #[serde(default)]
    #[schema(required)]
    pub cache_write_input_tokens: u64,
    pub output_tokens: u64,
}
