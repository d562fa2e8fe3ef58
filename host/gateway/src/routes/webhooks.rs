//! `/v1/webhooks`: URLs that events are sent to, and deliveries that failed.

use super::page_limit;
use crate::{ApiError, Gateway, access::Details, body::JsonBody};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::{
    DeadLetter, DeadLetterTarget, NewWebhook, TopicPattern, WebhookState, WebhookSummary, WebhookTest,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewWebhookBody {
    url: String,
    topics: Vec<TopicPattern>,
    /// `whsec_` followed by base64.
    secret: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct DeadLettersQuery {
    /// Lists only dead letters older than the one with this id.
    before: Option<i64>,
    limit: Option<u32>,
}

/// Adds a webhook. No other response contains its secret.
pub(crate) async fn add(
    State(gateway): State<Gateway>,
    JsonBody(body): JsonBody<NewWebhookBody>,
) -> Result<(StatusCode, Extension<Details>, Json<Value>), ApiError> {
    let NewWebhookBody { url, topics, secret } = body;
    let (webhook, secret) = gateway.host.add_webhook(NewWebhook { url, topics, secret }).await?;
    let mut value = webhook_json(&webhook);
    value["secret"] = json!(secret);
    // The path and the query may be secret, so only the origin is logged.
    let origin = webhook.url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
    let details = Details(format!("webhook={} origin={origin}", webhook.id));
    Ok((StatusCode::CREATED, Extension(details), Json(value)))
}

pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<Value>, ApiError> {
    let webhooks = gateway.host.webhook_states().await?;
    let webhooks: Vec<Value> = webhooks.iter().map(webhook_state_json).collect();
    Ok(Json(json!({"object": "list", "data": webhooks, "has_more": false})))
}

/// Sends one test event and reports the receiver's response, whatever it is.
pub(crate) async fn test(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let WebhookTest { event_id, status, error, answer, took_ms } = gateway.host.test_webhook(&id).await?;
    Ok(Json(json!({
        "object": "webhook_test",
        "webhook": id,
        "event_id": event_id,
        "delivered": error.is_none(),
        "status": status,
        "error": error,
        "answer": answer,
        "took_ms": took_ms,
    })))
}

pub(crate) async fn remove(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    gateway.host.remove_webhook(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

pub(crate) async fn dead_letters(
    State(gateway): State<Gateway>,
    Query(query): Query<DeadLettersQuery>,
) -> Result<Json<Value>, ApiError> {
    let limit = page_limit(query.limit)?;
    let dead = gateway.host.dead_letters(query.before, limit).await?;
    let has_more = dead.len() as u32 == limit;
    let dead: Vec<Value> = dead.iter().map(dead_letter_json).collect();
    Ok(Json(json!({"object": "list", "data": dead, "has_more": has_more})))
}

pub(crate) async fn redeliver(
    State(gateway): State<Gateway>,
    Path(id): Path<i64>,
) -> Result<StatusCode, ApiError> {
    gateway.host.redeliver(id).await?;
    Ok(StatusCode::ACCEPTED)
}

fn webhook_json(webhook: &WebhookSummary) -> Value {
    json!({
        "object": "webhook",
        "id": webhook.id,
        "url": webhook.url,
        "topics": webhook.topics,
        "configured": webhook.is_configured,
        "created_at_ms": webhook.created_at_ms,
        "disabled": webhook.disabled,
        "last_try": webhook.last_try.as_ref().map(|last| {
            json!({"at_ms": last.at_ms, "status": last.status, "error": last.error})
        }),
    })
}

fn webhook_state_json(state: &WebhookState) -> Value {
    let mut value = webhook_json(&state.webhook);
    value["waiting"] = json!(state.waiting);
    value["next_try_at_ms"] = json!(state.next_try_at_ms);
    value
}

fn dead_letter_json(dead: &DeadLetter) -> Value {
    let (agent, session, webhook) = match &dead.to {
        DeadLetterTarget::Session { agent, session } => (Some(agent), session.as_ref(), None),
        DeadLetterTarget::Webhook(id) => (None, None, Some(id)),
    };
    json!({
        "object": "dead_letter",
        "id": dead.id,
        "event_id": dead.event_id,
        "topic": dead.topic,
        "at_ms": dead.at_ms,
        "agent": agent,
        "session": session,
        "webhook": webhook,
        "attempts": dead.attempts,
        "error": dead.error,
    })
}
