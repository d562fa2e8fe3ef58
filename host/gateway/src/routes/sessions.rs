//! `/v1/agents/{agent}/sessions`: listing, reading, forking and deleting an agent's sessions.

use super::page_limit;
use crate::{
    ApiError, Gateway,
    body::{JsonBody, run_on_compute},
    caller::Caller,
    openai,
};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::{HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use skep_api::{
    Conversation, ForkSession, Message, MessagePage, NumberedMessage, Session, SessionDetail, SessionPage,
    marker,
};
use skep_engine::{Cancel, Engine, EngineError, Model, SpecialTokens, chat::ChatMessage};
use skep_runtime::{SessionSummary, tenant_of};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// The tenant whose sessions are listed; an admin may name any.
    tenant: Option<String>,
    /// Lists only sessions whose id comes after this one.
    after: Option<String>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Lists the sessions of an agent in the order of their ids.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions", tag = "sessions", operation_id = "list_sessions",
    params(("agent" = String, Path, description = "Name of the agent"), ListQuery),
    responses(
        (status = 200, description = "A page of sessions.", body = SessionPage),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
    Query(query): Query<ListQuery>,
) -> Result<Json<SessionPage>, ApiError> {
    let limit = page_limit(query.limit)?;
    let tenant = caller.tenant(query.tenant.as_deref())?;
    let sessions = gateway.host.sessions(&tenant, &agent, query.after.as_deref(), limit).await?;
    let has_more = sessions.len() as u32 == limit;
    let sessions = sessions.iter().map(|session| {
        let id = tenant.session(&session.id)?;
        Ok(named(session, caller.name_of(&id)))
    });
    Ok(Json(SessionPage::new(sessions.collect::<Result<Vec<Session>, ApiError>>()?, has_more)))
}

/// Shows a session: its conversations, its first messages and what it holds.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}", tag = "sessions", operation_id = "get_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
    ),
    responses(
        (status = 200, description = "The session.", body = SessionDetail),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
) -> Result<Json<SessionDetail>, ApiError> {
    let detail = gateway.host.session(&agent, &session).await?;
    Ok(Json(described(detail, caller.name_of(&session))))
}

/// Returns the session as clients see it, under the name that the caller uses.
pub(crate) fn described(detail: skep_runtime::SessionDetail, name: String) -> SessionDetail {
    let conversations = detail.conversations.into_iter().map(|conversation| Conversation {
        name: conversation.name,
        model: conversation.model,
        messages: conversation.messages,
        bytes: conversation.bytes,
    });
    SessionDetail {
        session: named(&detail.summary, name),
        conversations: conversations.collect(),
        messages: detail.messages.into_iter().map(message).collect(),
        has_more: detail.has_more,
        usage: openai::usage(&detail.usage),
        state_keys: detail.state_keys,
        state_bytes: detail.state_bytes,
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct MessagesQuery {
    /// The conversation's name; the default is `main`.
    conversation: Option<String>,
    /// Lists only messages whose number is greater than this one.
    after: Option<u64>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
    /// Whether each message says how many tokens it has.
    #[serde(default)]
    tokens: bool,
}

/// Lists the messages of one conversation, with their numbers.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/messages", tag = "sessions",
    operation_id = "list_messages",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        MessagesQuery,
    ),
    responses(
        (status = 200, description = "A page of messages.", body = MessagePage),
        (status = 404, description = "`agent_not_found`, `session_not_found` or `conversation_not_found`"),
    ))]
pub(crate) async fn messages(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<MessagesQuery>,
) -> Result<Json<MessagePage>, ApiError> {
    let limit = page_limit(query.limit)?;
    let conversation = query.conversation.as_deref().unwrap_or("main");
    let page = gateway.host.messages(&agent, &session, conversation, query.after.unwrap_or(0), limit).await?;
    let has_more = page.messages.last().is_some_and(|(number, _)| *number < page.total);
    let total = page.total;
    let model = query.tokens.then(|| gateway.host.models().find(Some(&page.model)).ok()?.loaded()).flatten();
    let data = match model.as_ref().and_then(Model::engine).cloned() {
        Some(engine) => {
            let bytes = page.messages.iter().map(|(_, message)| message.text_bytes()).sum();
            let count = move |cancel: &Cancel| counted(page.messages, &engine, cancel);
            run_on_compute(&gateway, tenant_of(&session), bytes, count).await?
        }
        None => page.messages.into_iter().map(|(number, message)| (number, message, None)).collect(),
    };
    let data = data.into_iter().map(|(number, content, tokens)| NumberedMessage {
        message: message(content),
        number,
        tokens,
    });
    Ok(Json(MessagePage { object: marker::List, data: data.collect(), total, has_more }))
}

type Counted = (u64, ChatMessage, Option<u32>);

/// Counts the tokens of messages.
fn counted(
    messages: Vec<(u64, ChatMessage)>,
    engine: &Engine,
    cancel: &Cancel,
) -> Result<Vec<Counted>, ApiError> {
    let count = |text: &str| -> Result<usize, ApiError> {
        let tokens = engine.tokenizer().encode(text, SpecialTokens::Literal);
        Ok(tokens.map_err(EngineError::from)?.len())
    };
    let mut all = Vec::with_capacity(messages.len());
    for (number, message) in messages {
        cancel.check()?;
        let mut tokens = count(&message.content)?;
        if let Some(reasoning) = &message.reasoning {
            tokens += count(reasoning)?;
        }
        for call in &message.tool_calls {
            tokens += count(&call.name)? + count(&call.arguments)?;
        }
        all.push((number, message, Some(u32::try_from(tokens).unwrap_or(u32::MAX))));
    }
    Ok(all)
}

/// Copies a session. Both sessions share what the model has computed.
#[utoipa::path(post, path = "/v1/agents/{agent}/sessions/{session}/fork", tag = "sessions", operation_id = "fork_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session to copy"),
    ),
    request_body = ForkSession,
    responses(
        (status = 201, description = "The copy.", body = Session, headers(("location" = String, description = "Path of the copy"))),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
        (status = 409, description = "`session_exists`"),
    ))]
pub(crate) async fn fork(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
    JsonBody(ForkSession { session: to }): JsonBody<ForkSession>,
) -> Result<Response, ApiError> {
    let summary = gateway.host.fork_session(&agent, &session, &caller.session(&to)?).await?;
    Ok(created(&agent, &summary))
}

/// Returns the response to a request that created a session.
pub(super) fn created(agent: &str, session: &SessionSummary) -> Response {
    let mut response = (StatusCode::CREATED, Json(named(session, session.id.clone()))).into_response();
    // Names of agents and sessions are plain ASCII.
    if let Ok(path) = HeaderValue::from_str(&format!("/v1/agents/{agent}/sessions/{}", session.id)) {
        response.headers_mut().insert(header::LOCATION, path);
    }
    response
}

/// Deletes a session with its state, conversations, turns and log lines.
#[utoipa::path(delete, path = "/v1/agents/{agent}/sessions/{session}", tag = "sessions", operation_id = "delete_session",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
    ),
    responses(
        (status = 204, description = "The session is deleted."),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
    ))]
pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    gateway.host.delete_session(&agent, &session).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the summary of a session under the name that the caller uses for it.
fn named(session: &SessionSummary, id: String) -> Session {
    let SessionSummary { turns, created_at_ms, updated_at_ms, .. } = *session;
    Session { object: marker::Session, id, turns, created_at_ms, updated_at_ms }
}

fn message(message: ChatMessage) -> Message {
    Message {
        role: message.role.as_str().to_owned(),
        tool_calls: message.tool_calls.iter().map(openai::tool_call).collect(),
        content: message.content,
        reasoning: message.reasoning,
        tool_call_id: message.tool_call_id,
    }
}
