//! `/v1/webhooks`: URLs that events are sent to, and deliveries that failed.

use super::page_limit;
use crate::{
    ApiError, Gateway,
    access::Details,
    body::{JsonBody, field},
};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use serde::Deserialize;
use skep_api::{
    AddedWebhook, DeadLetter, DeadLetterPage, NewWebhook, Webhook, WebhookPage, WebhookState, WebhookTest,
    WebhookTry, marker,
};
use skep_runtime::{DeadLetterTarget, WebhookSummary};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct DeadLettersQuery {
    /// Lists only dead letters older than the one with this id.
    before: Option<i64>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Adds a webhook. No other response contains its secret.
#[utoipa::path(post, path = "/v1/webhooks", tag = "webhooks", operation_id = "add_webhook", request_body = NewWebhook, responses(
    (status = 201, description = "The webhook with its secret.", body = AddedWebhook),
))]
pub(crate) async fn add(
    State(gateway): State<Gateway>,
    JsonBody(body): JsonBody<NewWebhook>,
) -> Result<(StatusCode, Extension<Details>, Json<AddedWebhook>), ApiError> {
    let NewWebhook { url, topics, secret } = body;
    let new = skep_runtime::NewWebhook { url, topics: field("topics", topics)?, secret };
    let (webhook, secret) = gateway.host.add_webhook(new).await?;
    // The path and the query may be secret, so only the origin is logged.
    let origin = webhook.url.splitn(4, '/').take(3).collect::<Vec<_>>().join("/");
    let details = Details(format!("webhook={} origin={origin}", webhook.id));
    let added = AddedWebhook { webhook: described(webhook), secret };
    Ok((StatusCode::CREATED, Extension(details), Json(added)))
}

/// Lists the webhooks with the state of their deliveries.
#[utoipa::path(get, path = "/v1/webhooks", tag = "webhooks", operation_id = "list_webhooks", responses(
    (status = 200, description = "All webhooks.", body = WebhookPage),
))]
pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<WebhookPage>, ApiError> {
    let webhooks = gateway.host.webhook_states().await?.into_iter().map(|state| WebhookState {
        webhook: described(state.webhook),
        waiting: state.waiting,
        next_try_at_ms: state.next_try_at_ms,
    });
    Ok(Json(WebhookPage::new(webhooks, false)))
}

/// Sends one test event and reports the receiver's response, whatever it is.
#[utoipa::path(post, path = "/v1/webhooks/{webhook}/test", tag = "webhooks", operation_id = "test_webhook",
    params(("webhook" = String, Path, description = "Id of the webhook")),
    responses(
        (status = 200, description = "The result of the test.", body = WebhookTest),
        (status = 404, description = "`webhook_not_found`"),
    ))]
pub(crate) async fn test(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
) -> Result<Json<WebhookTest>, ApiError> {
    let skep_runtime::WebhookTest { event_id, status, error, answer, took_ms } =
        gateway.host.test_webhook(&id).await?;
    Ok(Json(WebhookTest {
        object: marker::WebhookTest,
        webhook: id,
        event_id,
        delivered: error.is_none(),
        status,
        error,
        answer,
        took_ms,
    }))
}

/// Removes a webhook.
#[utoipa::path(delete, path = "/v1/webhooks/{webhook}", tag = "webhooks", operation_id = "remove_webhook",
    params(("webhook" = String, Path, description = "Id of the webhook")),
    responses(
        (status = 204, description = "The webhook is removed."),
        (status = 404, description = "`webhook_not_found`"),
    ))]
pub(crate) async fn remove(
    State(gateway): State<Gateway>,
    Path(id): Path<String>,
) -> Result<StatusCode, ApiError> {
    gateway.host.remove_webhook(&id).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Lists the deliveries that failed permanently, newest first.
#[utoipa::path(get, path = "/v1/webhooks/dead-letters", tag = "webhooks", operation_id = "list_dead_letters",
    params(DeadLettersQuery),
    responses((status = 200, description = "A page of dead letters.", body = DeadLetterPage)))]
pub(crate) async fn dead_letters(
    State(gateway): State<Gateway>,
    Query(query): Query<DeadLettersQuery>,
) -> Result<Json<DeadLetterPage>, ApiError> {
    let limit = page_limit(query.limit)?;
    let dead = gateway.host.dead_letters(query.before, limit).await?;
    let has_more = dead.len() as u32 == limit;
    Ok(Json(DeadLetterPage::new(dead.into_iter().map(dead_letter), has_more)))
}

/// Delivers a dead letter again.
#[utoipa::path(post, path = "/v1/webhooks/dead-letters/{id}/redeliver", tag = "webhooks", operation_id = "redeliver",
    params(("id" = i64, Path, description = "Id of the dead letter")),
    responses(
        (status = 202, description = "The delivery is due now."),
        (status = 404, description = "`dead_letter_not_found`"),
    ))]
pub(crate) async fn redeliver(
    State(gateway): State<Gateway>,
    Path(id): Path<i64>,
) -> Result<StatusCode, ApiError> {
    gateway.host.redeliver(id).await?;
    Ok(StatusCode::ACCEPTED)
}

fn described(webhook: WebhookSummary) -> Webhook {
    let last_try =
        webhook.last_try.map(|last| WebhookTry { at_ms: last.at_ms, status: last.status, error: last.error });
    Webhook {
        object: marker::Webhook,
        id: webhook.id,
        url: webhook.url,
        topics: webhook.topics.iter().map(ToString::to_string).collect(),
        configured: webhook.is_configured,
        created_at_ms: webhook.created_at_ms,
        disabled: webhook.disabled,
        last_try,
    }
}

fn dead_letter(dead: skep_runtime::DeadLetter) -> DeadLetter {
    let (agent, session, webhook) = match dead.to {
        DeadLetterTarget::Session { agent, session } => (Some(agent), session, None),
        DeadLetterTarget::Webhook(id) => (None, None, Some(id)),
    };
    DeadLetter {
        object: marker::DeadLetter,
        id: dead.id,
        event_id: dead.event_id,
        topic: dead.topic,
        at_ms: dead.at_ms,
        agent,
        session,
        webhook,
        attempts: dead.attempts,
        error: dead.error,
    }
}
