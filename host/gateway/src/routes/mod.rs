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

use crate::{ApiError, Gateway};
use skep_engine::Cancel;
use skep_runtime::QUICK_BYTES;

const MAX_PAGE: u32 = 1000;

/// How many rows a listing gives: what was asked for, within bounds.
fn page_limit(asked: Option<u32>) -> Result<u32, ApiError> {
    match asked.unwrap_or(100) {
        limit @ 1..=MAX_PAGE => Ok(limit),
        limit => Err(ApiError::parameter("limit", format!("limit is {limit}; it may be 1 to {MAX_PAGE}"))),
    }
}

/// Does work for a tenant about so many bytes: where no other request waits for it, if it may take long. A client that goes
/// away gives it up.
pub(crate) async fn apart<T: Send + 'static>(
    gateway: &Gateway,
    tenant: &str,
    bytes: usize,
    work: impl FnOnce(&Cancel) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    gateway.host.compute().run_unless(bytes <= QUICK_BYTES, tenant, work).await
}

/// Stands for work that takes long whatever it is about.
const LONG: usize = usize::MAX;
