//! Delivery of an event to a webhook.

use super::{backoff::Backoff, count, permits::Permit};
use crate::{
    courier::Context,
    webhook::{Webhook, message, message_id},
};
use jiff::{Timestamp, fmt::rfc2822};
use skep_outbound::WebhookMessage;
use skep_store::{Delivery, StoreError, Target, WebhookTry};
use std::sync::Arc;

/// Maximum number of attempts before an event becomes a dead letter. With the delays below they
/// take about four hours.
const MAX_ATTEMPTS: u32 = 10;
/// Delays before the retries of an event to a webhook: two seconds, then each time four times as long, up to an hour. They are the
/// longest of all deliveries.
pub(super) const WEBHOOK_BACKOFF: Backoff = Backoff { first_ms: 2_000, factor: 4, most_ms: 3_600_000 };
/// Longest delay that a receiver can request.
const MAX_RETRY_AFTER_MS: u64 = 24 * 3600 * 1000;
/// HTTP status of an address that is gone permanently.
const GONE: u16 = 410;

pub(super) struct WebhookDelivery {
    pub(super) context: Arc<Context>,
    pub(super) row: Delivery,
}

enum Verdict {
    /// The receiver accepted the event with this HTTP status.
    Done(u16),
    Failed {
        /// Status of the HTTP response, if there was one.
        status: Option<u16>,
        error: String,
        /// Delay that the receiver requested, if any.
        retry_after_ms: Option<u64>,
    },
    /// The receiver no longer accepts events.
    Gone(Arc<Webhook>),
    /// The webhook was disabled meanwhile, and nothing was sent.
    Disabled(String),
}

impl WebhookDelivery {
    pub(super) async fn deliver(self, _permit: Permit) {
        let Target::Webhook(id) = &self.row.target else { return };
        // A removed webhook took its deliveries with it.
        let Some(webhook) = self.context.webhooks.get(id) else { return };
        let verdict = match &webhook.summary.disabled {
            Some(why) => Verdict::Disabled(why.clone()),
            None => self.send(webhook).await,
        };
        self.note(id, verdict).await;
    }

    async fn send(&self, webhook: Arc<Webhook>) -> Verdict {
        let failed = |error: String| Verdict::Failed { status: None, error, retry_after_ms: None };
        let body = match message(&self.row) {
            Ok(body) => body,
            Err(error) => return failed(error),
        };
        let secret = match self.context.webhooks.secret(&webhook).await {
            Ok(secret) => secret,
            Err(error) => return failed(error.to_string()),
        };
        // Another host that has taken over sends the event itself.
        self.context.store.until_certain().await;
        let now_ms = self.context.clock.now_ms();
        let message = WebhookMessage {
            url: &webhook.summary.url,
            secret: &secret,
            id: &message_id(&self.row),
            timestamp_s: now_ms / 1000,
            body: &body,
        };
        let answer = match self.context.egress.client.send_webhook(&message).await {
            Ok(answer) => answer,
            Err(error) => return failed(error.to_string()),
        };
        match answer.status {
            status @ 200..=299 => Verdict::Done(status),
            GONE => Verdict::Gone(webhook),
            status => Verdict::Failed {
                status: Some(status),
                error: format!("{} answered HTTP {status}", webhook.summary.url),
                retry_after_ms: answer.retry_after.and_then(|value| retry_after_ms(&value, now_ms)),
            },
        }
    }

    async fn note(&self, id: &str, verdict: Verdict) {
        let Delivery { key, attempt, topic, event_id: event, .. } = &self.row;
        let (context, store) = (&self.context, &self.context.store);
        // The last attempt is only shown to people, so an error here does not block the delivery.
        if let Err(error) = self.note_try(id, &verdict).await {
            tracing::warn!(webhook = id, "cannot store the last attempt of a webhook: {error}");
        }
        match verdict {
            Verdict::Done(_) => {
                count("webhook", "ok");
                let finish = || store.finish_delivery(*key);
                context.shutdown.stored("the delivery of an event to a webhook", finish).await;
            }
            Verdict::Failed { error, retry_after_ms, .. } if *attempt < MAX_ATTEMPTS => {
                count("webhook", "retried");
                let wait_ms = WEBHOOK_BACKOFF.delay_ms(*attempt).max(retry_after_ms.unwrap_or(0));
                let wake_ms = context.clock.now_ms() + wait_ms;
                let reschedule = || store.retry_delivery(*key, *attempt, wake_ms, &error);
                context
                    .shutdown
                    .stored("the next attempt to deliver an event to a webhook", reschedule)
                    .await;
            }
            Verdict::Failed { error, .. } | Verdict::Disabled(error) => {
                count("webhook", "failed");
                tracing::warn!(
                    webhook = id,
                    topic,
                    event,
                    "an event could not be delivered to a webhook in {attempt} attempts; `skep webhook redeliver {}` tries it \
                     again: {error}",
                    key.0
                );
                let dead_letter = || store.dead_letter_delivery(*key, &error);
                context.shutdown.stored("the failure of a delivery to a webhook", dead_letter).await;
            }
            Verdict::Gone(webhook) => {
                count("webhook", "failed");
                let why = gone_permanently(&webhook);
                tracing::warn!(webhook = id, "disabling a webhook: {why}");
                if let Err(error) = context.webhooks.disable(&context.outbox.router, &webhook, &why).await {
                    tracing::error!("cannot disable the webhook: {error}");
                }
                let dead_letter = || store.dead_letter_delivery(*key, &why);
                context.shutdown.stored("the failure of a delivery to a webhook", dead_letter).await;
            }
        }
    }

    /// Stores the result of the attempt, and logs when a webhook starts failing and when it
    /// recovers.
    async fn note_try(&self, id: &str, verdict: &Verdict) -> Result<(), StoreError> {
        let (status, error) = match verdict {
            Verdict::Done(status) => (Some(*status), None),
            Verdict::Failed { status, error, .. } => (*status, Some(error.clone())),
            Verdict::Gone(webhook) => (Some(GONE), Some(gone_permanently(webhook))),
            Verdict::Disabled(_) => return Ok(()),
        };
        let webhooks = &self.context.webhooks;
        let last = WebhookTry { at_ms: self.context.clock.now_ms(), status, error: error.clone() };
        let before = webhooks.note_try(id, last).await?;
        let was_well = before.is_none_or(|before| before.error.is_none());
        match error {
            Some(error) if was_well => tracing::warn!(
                webhook = id,
                topic = self.row.topic,
                event = self.row.event_id,
                "a webhook is failing; each of its events is tried up to {MAX_ATTEMPTS} times over several hours: {error}"
            ),
            None if !was_well => tracing::info!(webhook = id, "a webhook accepts events again"),
            _ => {}
        }
        Ok(())
    }
}

fn gone_permanently(webhook: &Webhook) -> String {
    format!("{} answered HTTP {GONE}: it is gone permanently", webhook.summary.url)
}

/// Parses a `retry-after` header, which holds seconds or a date.
fn retry_after_ms(value: &str, now_ms: u64) -> Option<u64> {
    let wait_ms = match value.trim().parse::<u64>() {
        Ok(seconds) => seconds.saturating_mul(1_000),
        Err(_) => {
            let at: Timestamp = rfc2822::parse(value.trim()).ok()?.timestamp();
            u64::try_from(at.as_millisecond()).ok()?.saturating_sub(now_ms)
        }
    };
    Some(wait_ms.min(MAX_RETRY_AFTER_MS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_attempts_of_an_event_take_about_four_hours() {
        let delays_ms = (1..MAX_ATTEMPTS).map(|attempt| WEBHOOK_BACKOFF.delay_ms(attempt));
        let hours = delays_ms.sum::<u64>() as f64 / 3.6e6;
        assert!((3.7..4.8).contains(&hours), "{hours} h");
    }

    #[test]
    fn retry_after_is_parsed_as_seconds_or_a_date() {
        assert_eq!(retry_after_ms("120", 0), Some(120_000));
        let now_ms = 1_445_412_480_000;
        assert_eq!(retry_after_ms("Wed, 21 Oct 2015 07:28:30 GMT", now_ms), Some(30_000));
        assert_eq!(retry_after_ms("Wed, 21 Oct 2015 07:27:00 GMT", now_ms), Some(0), "the date has passed");
        assert_eq!(retry_after_ms(&u64::MAX.to_string(), 0), Some(MAX_RETRY_AFTER_MS));
        assert_eq!(retry_after_ms("soon", 0), None);
    }
}
