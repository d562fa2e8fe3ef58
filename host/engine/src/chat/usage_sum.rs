//! The usage over all answers of a conversation, in its stored form.

use serde::{Deserialize, Serialize};

use crate::Usage;

/// Returns whether a count is 0, so that usage without what only some models have is stored as in earlier versions.
fn is_none(count: &u32) -> bool {
    *count == 0
}

/// The stored form of [`Usage`]. A count that is missing in stored data is 0.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Usage")]
pub(super) struct UsageSum {
    #[serde(default)]
    prompt_tokens: u32,
    #[serde(default)]
    cached_tokens: u32,
    #[serde(default)]
    completion_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    reasoning_tokens: u32,
    #[serde(default)]
    forced_tokens: u32,
    #[serde(default)]
    accepted_tokens: u32,
    #[serde(default)]
    rejected_tokens: u32,
    #[serde(default, rename = "taken_back_tokens")]
    rolled_back_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    refused_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    cache_write_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    prefilled_tokens: u32,
    #[serde(default, skip_serializing_if = "is_none")]
    prefill_ms: u32,
}
