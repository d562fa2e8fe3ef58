//! Agents as models of OpenAI's routes: `"model": "agent:NAME"`.

use crate::{ApiError, Gateway, caller::Caller, headers};
use axum::http::{HeaderMap, StatusCode};
use skep_engine::Priority;
use skep_runtime::{Invocation, Origin, RunHandle, RuntimeError};

/// Sends a text to a session of an agent, given by the host's id. A detached turn continues without its caller.
pub(super) async fn invoke(
    gateway: &Gateway,
    caller: &Caller,
    headers: &HeaderMap,
    (agent, session): (&str, String),
    text: String,
    detached: bool,
) -> Result<RunHandle, ApiError> {
    let invocation = Invocation {
        session,
        key: caller.key().map(str::to_owned),
        principal: caller.tenant.to_string(),
        agent: agent.to_owned(),
        text,
        data: None,
        origin: Origin::Chat,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: headers::idempotency_key(headers)?,
        detached,
    };
    gateway.host.invoke(invocation).await.map_err(|error| match error {
        RuntimeError::AgentNotFound { .. } => {
            ApiError::new(StatusCode::NOT_FOUND, "model_not_found", error.to_string())
        }
        error => error.into(),
    })
}

/// Returns the host's id of the session that a request names in a header or as its user, or of a new one.
pub(super) fn session(
    caller: &Caller,
    headers: &HeaderMap,
    user: Option<&String>,
) -> Result<String, ApiError> {
    let named = headers::session(headers)?.or_else(|| user.cloned());
    caller.session(&named.unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string()))
}
