//! The handlers, a file for each noun of the paths.

pub(crate) mod agents;
pub(crate) mod chat_completions;
pub(crate) mod completions;
pub(crate) mod health;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod sessions;
pub(crate) mod triggers;

use crate::ApiError;

const MAX_PAGE: u32 = 1000;

/// How many rows a listing gives: what was asked for, within bounds.
fn page_limit(asked: Option<u32>) -> Result<u32, ApiError> {
    match asked.unwrap_or(100) {
        limit @ 1..=MAX_PAGE => Ok(limit),
        limit => Err(ApiError::parameter("limit", format!("limit is {limit}; it may be 1 to {MAX_PAGE}"))),
    }
}
