//! The handlers, a file for each noun of the paths.

pub(crate) mod agents;
pub(crate) mod ai_batches;
pub(crate) mod ai_run;
pub(crate) mod approvals;
pub(crate) mod chat_completions;
pub(crate) mod completions;
pub(crate) mod events;
pub(crate) mod health;
pub(crate) mod held;
pub(crate) mod keys;
pub(crate) mod logs;
pub(crate) mod mcp_servers;
pub(crate) mod messages;
pub(crate) mod models;
pub(crate) mod schedules;
pub(crate) mod secrets;
pub(crate) mod session_exports;
pub(crate) mod sessions;
pub(crate) mod triggers;
pub(crate) mod turns;
pub(crate) mod versions;
pub(crate) mod webhooks;

use crate::ApiError;
use axum::http::StatusCode;

/// Up to this much text is encoded at once, in about a millisecond; more of it somewhere else.
const QUICK_TEXT_BYTES: usize = 16 << 10;
const MAX_PAGE: u32 = 1000;

/// How many rows a listing gives: what was asked for, within bounds.
fn page_limit(asked: Option<u32>) -> Result<u32, ApiError> {
    match asked.unwrap_or(100) {
        limit @ 1..=MAX_PAGE => Ok(limit),
        limit => Err(ApiError::parameter("limit", format!("limit is {limit}; it may be 1 to {MAX_PAGE}"))),
    }
}

/// Does work that may take long on a thread where no other request waits for it.
async fn apart<T: Send + 'static>(
    is_quick: bool,
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if is_quick {
        return work();
    }
    let failed =
        |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal", "the server failed on this request");
    let span = tracing::Span::current();
    tokio::task::spawn_blocking(move || span.in_scope(work)).await.map_err(failed)?
}
