//! `/v1/agents/{agent}/sessions/{session}/warm` and `…/pin`: the KV pages of a session on disk.

use crate::{ApiError, Gateway, caller::Caller};
use axum::{
    Json,
    extract::{Path, State},
};
use skep_api::{SessionPin, WarmedConversation, WarmedSession, marker};

/// Reads the KV pages of a session's conversations from the disk into memory, before its next turn needs them. Nothing is
/// computed, and only room that running requests leave is taken.
#[utoipa::path(post, path = "/v1/agents/{agent}/sessions/{session}/warm", tag = "sessions", operation_id = "warm_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
    ),
    responses(
        (status = 200, description = "Tokens that were found, read, and would have to be computed.", body = WarmedSession),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
    ))]
pub(crate) async fn warm(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
) -> Result<Json<WarmedSession>, ApiError> {
    let warmed = gateway.host.warm_session(&agent, &session).await?;
    let conversations = warmed.into_iter().map(|conversation| WarmedConversation {
        name: conversation.name,
        model: conversation.model,
        tokens: conversation.tokens,
        in_memory_tokens: conversation.in_memory_tokens,
        on_disk_tokens: conversation.on_disk_tokens,
        read_tokens: conversation.read_tokens,
        missing_tokens: conversation.missing_tokens,
        skipped: conversation.skipped.map(str::to_owned),
    });
    Ok(Json(WarmedSession {
        object: marker::WarmedSession,
        agent,
        session: caller.name_of(&session),
        conversations: conversations.collect(),
    }))
}

/// Makes the pages of a session the last to be evicted from the disk, as far as the share of pins allows.
#[utoipa::path(post, path = "/v1/agents/{agent}/sessions/{session}/pin", tag = "sessions", operation_id = "pin_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
    ),
    responses(
        (status = 200, description = "The session is pinned.", body = SessionPin),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
        (status = 409, description = "`kv_disk_off`, or `host_full` if too many sessions are pinned"),
    ))]
pub(crate) async fn pin(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
) -> Result<Json<SessionPin>, ApiError> {
    let has_changed = gateway.host.pin_session(&agent, &session).await?;
    Ok(Json(described(agent, caller.name_of(&session), true, has_changed)))
}

/// Undoes a pin. The session may have been deleted meanwhile.
#[utoipa::path(delete, path = "/v1/agents/{agent}/sessions/{session}/pin", tag = "sessions", operation_id = "unpin_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
    ),
    responses(
        (status = 200, description = "The session is not pinned.", body = SessionPin),
        (status = 409, description = "`kv_disk_off`"),
    ))]
pub(crate) async fn unpin(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
) -> Result<Json<SessionPin>, ApiError> {
    let has_changed = gateway.host.unpin_session(&agent, &session).await?;
    Ok(Json(described(agent, caller.name_of(&session), false, has_changed)))
}

fn described(agent: String, session: String, is_pinned: bool, has_changed: bool) -> SessionPin {
    SessionPin { object: marker::SessionPin, agent, session, is_pinned, has_changed }
}
