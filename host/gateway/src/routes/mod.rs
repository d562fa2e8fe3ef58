//! The handlers, in one file for each noun in the paths.

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

use crate::{ApiError, Gateway};
use skep_engine::Cancel;
use skep_runtime::QUICK_BYTES;

const MAX_PAGE: u32 = 1000;

/// Returns the number of rows of a listing: the requested number, within bounds.
fn page_limit(asked: Option<u32>) -> Result<u32, ApiError> {
    match asked.unwrap_or(100) {
        limit @ 1..=MAX_PAGE => Ok(limit),
        limit => Err(ApiError::parameter("limit", format!("limit is {limit}; it must be 1 to {MAX_PAGE}"))),
    }
}

/// Runs work on about `bytes` bytes for a tenant. Work that may take long runs where it does not block other
/// requests, and is cancelled if the client disconnects.
pub(crate) async fn apart<T: Send + 'static>(
    gateway: &Gateway,
    tenant: &str,
    bytes: usize,
    work: impl FnOnce(&Cancel) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    gateway.host.compute().run_unless(bytes <= QUICK_BYTES, tenant, work).await
}

/// The size given for work that takes long whatever its size.
const LONG: usize = usize::MAX;
