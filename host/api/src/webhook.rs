//! Webhooks, and deliveries that failed permanently.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A webhook, without its secret.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Webhook {
    #[schema(inline)]
    pub object: marker::Webhook,
    pub id: String,
    pub url: String,
    pub topics: Vec<String>,
    /// Whether `skep.toml` defines the webhook, so that it can only be removed there.
    pub configured: bool,
    pub created_at_ms: u64,
    /// The reason why events are no longer sent to the webhook.
    #[schema(required)]
    pub disabled: Option<String>,
    #[schema(required)]
    pub last_try: Option<WebhookTry>,
}

/// Result of the last attempt to send something.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WebhookTry {
    pub at_ms: u64,
    /// Status of the HTTP response, if there was one.
    #[schema(required)]
    pub status: Option<u16>,
    #[schema(required)]
    pub error: Option<String>,
}

/// A webhook with the state of its deliveries.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WebhookState {
    #[serde(flatten)]
    pub webhook: Webhook,
    /// Number of events that wait for delivery to the webhook.
    pub waiting: u64,
    #[schema(required)]
    pub next_try_at_ms: Option<u64>,
}

/// A webhook to add.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewWebhook {
    pub url: String,
    /// Topics of the events to send; `*` stands for the rest of a topic.
    pub topics: Vec<String>,
    /// `whsec_` followed by base64; by default, the host makes one.
    pub secret: Option<String>,
}

/// A new webhook with its secret, which no other response contains.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AddedWebhook {
    #[serde(flatten)]
    pub webhook: Webhook,
    pub secret: String,
}

/// Result of a test event.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct WebhookTest {
    #[schema(inline)]
    pub object: marker::WebhookTest,
    /// Id of the webhook.
    pub webhook: String,
    pub event_id: String,
    pub delivered: bool,
    /// Status of the HTTP response, if there was one.
    #[schema(required)]
    pub status: Option<u16>,
    #[schema(required)]
    pub error: Option<String>,
    /// Beginning of the response's body.
    pub answer: String,
    pub took_ms: u64,
}

/// A delivery that failed permanently, to a session of an agent or to a webhook.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct DeadLetter {
    #[schema(inline)]
    pub object: marker::DeadLetter,
    /// Increases over time.
    pub id: i64,
    pub event_id: String,
    pub topic: String,
    pub at_ms: u64,
    #[schema(required)]
    pub agent: Option<String>,
    #[schema(required)]
    pub session: Option<String>,
    /// Id of the webhook.
    #[schema(required)]
    pub webhook: Option<String>,
    /// Number of attempts that were made.
    pub attempts: u32,
    /// The error of the last attempt.
    pub error: String,
}
