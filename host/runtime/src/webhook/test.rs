//! Sends one test event to a webhook and returns the response.
//!
//! The event is signed like any other, goes to the same address under the same policy, and is not
//! retried.

use super::{Webhooks, envelope};
use crate::{RuntimeError, event::HOST_SOURCE, text::excerpt};
use serde_json::json;
use skep_outbound::WebhookMessage;
use skep_store::WebhookTry;
use std::time::Instant;

const TOPIC: &str = "skep.webhook.test";

/// The result of a test event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WebhookTest {
    pub event_id: String,
    /// Status of the HTTP response, if there was one.
    pub status: Option<u16>,
    /// The error, or `None` if the webhook accepted the event.
    pub error: Option<String>,
    /// The start of the response's body.
    pub answer: String,
    pub took_ms: u64,
}

impl Webhooks {
    /// Sends a test event to a webhook. A disabled webhook receives it too, and stays disabled.
    pub(crate) async fn test(&self, id: &str) -> Result<WebhookTest, RuntimeError> {
        let not_found = || RuntimeError::WebhookNotFound { id: excerpt(id) };
        let webhook = self.get(id).ok_or_else(not_found)?;
        let secret = self.secret(&webhook).await?;
        let (event_id, now_ms) = (format!("test-{}", uuid::Uuid::now_v7().simple()), self.clock.now_ms());
        let body =
            envelope(TOPIC, now_ms, &event_id, HOST_SOURCE, &json!({"webhook": id})).to_string().into_bytes();
        let message = WebhookMessage {
            url: &webhook.summary.url,
            secret: &secret,
            id: &event_id,
            timestamp_s: now_ms / 1000,
            body: &body,
        };
        let begun = Instant::now();
        let answered = self.egress.client.send_webhook(&message).await;
        let took_ms = u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX);
        let (status, error, answer) = match answered {
            Ok(answer) => {
                let refused = !(200..=299).contains(&answer.status);
                let error =
                    refused.then(|| format!("{} answered HTTP {}", webhook.summary.url, answer.status));
                (Some(answer.status), error, answer.text)
            }
            Err(error) => (None, Some(error.to_string()), String::new()),
        };
        self.note_try(id, WebhookTry { at_ms: now_ms, status, error: error.clone() }).await?;
        Ok(WebhookTest { event_id, status, error, answer, took_ms })
    }
}
