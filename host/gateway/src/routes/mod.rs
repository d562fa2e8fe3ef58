//! The handlers, in one file for each noun in the paths.

mod agent_as_model;
pub(crate) mod agents;
pub(crate) mod ai_batches;
pub(crate) mod ai_run;
pub(crate) mod anthropic_messages;
pub(crate) mod approvals;
pub(crate) mod batches;
pub(crate) mod caller;
pub(crate) mod chat_completions;
pub(crate) mod clusters;
pub(crate) mod completions;
pub(crate) mod config;
pub(crate) mod engine;
pub(crate) mod events;
mod expiry;
pub(crate) mod files;
mod follow;
pub(crate) mod health;
pub(crate) mod held;
pub(crate) mod keys;
pub(crate) mod kv;
pub(crate) mod limits;
pub(crate) mod listings;
pub(crate) mod logs;
pub(crate) mod mcp_servers;
pub(crate) mod messages;
pub(crate) mod model_changes;
pub(crate) mod models;
pub(crate) mod openapi_document;
pub(crate) mod requests;
pub(crate) mod responses;
pub(crate) mod schedules;
pub(crate) mod schemas;
pub(crate) mod secrets;
pub(crate) mod session_exports;
pub(crate) mod session_pages;
pub(crate) mod sessions;
pub(crate) mod status;
pub(crate) mod stored_responses;
pub(crate) mod tenants;
mod text_choice;
pub(crate) mod timelines;
pub(crate) mod tokenize;
pub(crate) mod triggers;
pub(crate) mod turns;
mod unimplemented;
pub(crate) mod usage;
pub(crate) mod versions;
pub(crate) mod webhooks;

use crate::ApiError;

const MAX_PAGE: u32 = 1000;

/// Returns the number of rows of a listing: the requested number, within bounds.
fn page_limit(asked: Option<u32>) -> Result<u32, ApiError> {
    page_limit_within(asked, (100, MAX_PAGE))
}

/// Returns the number of rows of a listing with this default and maximum.
fn page_limit_within(asked: Option<u32>, (default, most): (u32, u32)) -> Result<u32, ApiError> {
    match asked.unwrap_or(default) {
        limit if (1..=most).contains(&limit) => Ok(limit),
        limit => Err(ApiError::parameter("limit", format!("limit is {limit}; it must be 1 to {most}"))),
    }
}

/// Returns whether a listing begins with the oldest entry. OpenAI's begin with the newest one.
fn ascends(order: Option<&str>) -> Result<bool, ApiError> {
    match order {
        None | Some("desc") => Ok(false),
        Some("asc") => Ok(true),
        Some(other) => {
            Err(ApiError::parameter("order", format!("order is {other:?}; it must be asc or desc")))
        }
    }
}
