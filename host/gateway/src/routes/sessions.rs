//! `/v1/agents/{agent}/sessions`: listing, reading, forking and deleting an agent's sessions.

use super::page_limit;
use crate::{ApiError, Gateway, body::JsonBody, caller::Caller, openai};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_engine::chat::ChatMessage;
use skep_runtime::SessionSummary;

#[derive(Deserialize)]
pub(crate) struct ListQuery {
    /// The tenant whose sessions are listed; an admin may name any.
    tenant: Option<String>,
    /// Lists only sessions whose id comes after this one.
    after: Option<String>,
    limit: Option<u32>,
}

pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Value>, ApiError> {
    let limit = page_limit(query.limit)?;
    let tenant = caller.tenant(query.tenant.as_deref())?;
    let sessions = gateway.host.sessions(&tenant, &agent, query.after.as_deref(), limit).await?;
    let has_more = sessions.len() as u32 == limit;
    let sessions = sessions.iter().map(|session| {
        let id = tenant.session(&session.id)?;
        Ok(named_json(session, &caller.name_of(&id)))
    });
    let sessions = sessions.collect::<Result<Vec<Value>, ApiError>>()?;
    Ok(Json(json!({"object": "list", "data": sessions, "has_more": has_more})))
}

pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
) -> Result<Json<Value>, ApiError> {
    let detail = gateway.host.session(&agent, &session).await?;
    let mut value = named_json(&detail.summary, &caller.name_of(&session));
    let conversations = detail.conversations.iter().map(|conversation| {
        json!({
            "name": conversation.name,
            "model": conversation.model,
            "messages": conversation.messages,
            "bytes": conversation.bytes,
        })
    });
    value["conversations"] = conversations.collect();
    value["messages"] = detail.messages.iter().map(message_json).collect();
    value["has_more"] = json!(detail.has_more);
    value["usage"] = openai::usage_json(&detail.usage);
    value["state_keys"] = json!(detail.state_keys);
    value["state_bytes"] = json!(detail.state_bytes);
    Ok(Json(value))
}

#[derive(Deserialize)]
pub(crate) struct MessagesQuery {
    /// The conversation's name; the default is `main`.
    conversation: Option<String>,
    /// Lists only messages whose number is greater than this one.
    after: Option<u64>,
    limit: Option<u32>,
}

/// Returns a page of one conversation's messages, with their numbers.
pub(crate) async fn messages(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<MessagesQuery>,
) -> Result<Json<Value>, ApiError> {
    let limit = page_limit(query.limit)?;
    let conversation = query.conversation.as_deref().unwrap_or("main");
    let page = gateway.host.messages(&agent, &session, conversation, query.after.unwrap_or(0), limit).await?;
    let has_more = page.messages.last().is_some_and(|(number, _)| *number < page.total);
    let messages = page.messages.iter().map(|(number, message)| {
        let mut value = message_json(message);
        value["number"] = json!(number);
        value
    });
    Ok(Json(json!({
        "object": "list",
        "data": messages.collect::<Vec<_>>(),
        "total": page.total,
        "has_more": has_more,
    })))
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Fork {
    /// The id of the copy. A session with this id must not exist.
    session: String,
}

pub(crate) async fn fork(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
    JsonBody(Fork { session: to }): JsonBody<Fork>,
) -> Result<Response, ApiError> {
    let summary = gateway.host.fork_session(&agent, &session, &caller.session(&to)?).await?;
    Ok(created(&agent, &summary))
}

/// Returns the response to a request that created a session.
pub(super) fn created(agent: &str, session: &SessionSummary) -> Response {
    let mut response = (StatusCode::CREATED, Json(summary_json(session))).into_response();
    // Names of agents and sessions are plain ASCII.
    if let Ok(path) = HeaderValue::from_str(&format!("/v1/agents/{agent}/sessions/{}", session.id)) {
        response.headers_mut().insert(header::LOCATION, path);
    }
    response
}

pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    gateway.host.delete_session(&agent, &session).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn summary_json(session: &SessionSummary) -> Value {
    named_json(session, &session.id)
}

/// Returns the summary of a session under the name that the caller uses for it.
fn named_json(session: &SessionSummary, id: &str) -> Value {
    json!({
        "object": "session",
        "id": id,
        "turns": session.turns,
        "created_at_ms": session.created_at_ms,
        "updated_at_ms": session.updated_at_ms,
    })
}

fn message_json(message: &ChatMessage) -> Value {
    let mut value = json!({"role": message.role.as_str(), "content": message.content});
    if !message.tool_calls.is_empty() {
        value["tool_calls"] = message.tool_calls.iter().map(openai::tool_call_json).collect();
    }
    if let Some(id) = &message.tool_call_id {
        value["tool_call_id"] = json!(id);
    }
    value
}
