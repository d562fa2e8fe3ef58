//! An event on its way to a webhook.

use super::{backoff::Backoff, count, status::stored};
use crate::{
    agent_host::Services,
    event::webhook::{Webhook, message, message_id},
};
use jiff::{Timestamp, fmt::rfc2822};
use skep_outbound::WebhookMessage;
use skep_store::{Delivery, Target};
use std::sync::Arc;

/// How often an event is sent before it is a dead letter; with the waits below, over some five hours.
const TRIES: u32 = 10;
const BACKOFF: Backoff = Backoff { first_ms: 2_000, factor: 4, most_ms: 3_600_000 };
/// The longest that a receiver can ask for.
const MAX_RETRY_AFTER_MS: u64 = 24 * 3600 * 1000;
/// What HTTP says of an address that is gone for good.
const GONE: u16 = 410;

pub(super) struct WebhookDelivery {
    pub(super) services: Arc<Services>,
    pub(super) row: Delivery,
}

enum Verdict {
    Done,
    /// After this, if the receiver said so.
    Failed {
        error: String,
        retry_after_ms: Option<u64>,
    },
    /// Nothing is to be sent there any more.
    Gone(Arc<Webhook>),
    /// It was disabled meanwhile.
    Disabled(String),
}

impl WebhookDelivery {
    pub(super) async fn deliver(self) {
        let Target::Webhook(id) = &self.row.target else { return };
        // One that was removed took its deliveries along.
        let Some(webhook) = self.services.webhooks.get(id) else { return };
        let verdict = match &webhook.summary.disabled {
            Some(why) => Verdict::Disabled(why.clone()),
            None => self.send(webhook).await,
        };
        self.note(verdict).await;
    }

    async fn send(&self, webhook: Arc<Webhook>) -> Verdict {
        let failed = |error: String| Verdict::Failed { error, retry_after_ms: None };
        let body = match message(&self.row) {
            Ok(body) => body,
            Err(error) => return failed(error),
        };
        let secret = match self.services.webhooks.secret(&webhook).await {
            Ok(secret) => secret,
            Err(error) => return failed(error.to_string()),
        };
        let now_ms = self.services.clock.now_ms();
        let message = WebhookMessage {
            url: &webhook.summary.url,
            secret: &secret,
            id: &message_id(&self.row),
            timestamp_s: now_ms / 1000,
            body: &body,
        };
        let answer = match self.services.egress.client.send_webhook(&message).await {
            Ok(answer) => answer,
            Err(error) => return failed(error.to_string()),
        };
        match answer.status {
            200..=299 => Verdict::Done,
            GONE => Verdict::Gone(webhook),
            status => Verdict::Failed {
                error: format!("{} answered HTTP {status}", webhook.summary.url),
                retry_after_ms: answer.retry_after.and_then(|value| retry_after_ms(&value, now_ms)),
            },
        }
    }

    async fn note(&self, verdict: Verdict) {
        let Delivery { key, attempt, topic, event_id: event, .. } = &self.row;
        let (services, store) = (&self.services, &self.services.store);
        match verdict {
            Verdict::Done => {
                count("webhook", "ok");
                let finish = || store.finish_delivery(*key);
                stored(services, "the end of an event for a webhook", finish).await;
            }
            Verdict::Failed { error, retry_after_ms } if *attempt < TRIES => {
                count("webhook", "retried");
                let wait_ms = BACKOFF.delay_ms(*attempt).max(retry_after_ms.unwrap_or(0));
                let wake_ms = services.clock.now_ms() + wait_ms;
                let put_off = || store.retry_delivery(*key, *attempt, wake_ms, &error);
                stored(services, "the next try of an event for a webhook", put_off).await;
            }
            Verdict::Failed { error, .. } | Verdict::Disabled(error) => {
                count("webhook", "failed");
                tracing::warn!(topic, event, "an event for a webhook is given up: {error}");
                let bury = || store.bury_delivery(*key, &error);
                stored(services, "the end of an event for a webhook", bury).await;
            }
            Verdict::Gone(webhook) => {
                count("webhook", "failed");
                let why = format!("{} answered HTTP {GONE}: it is gone for good", webhook.summary.url);
                tracing::warn!(webhook = webhook.summary.id, "a webhook is disabled: {why}");
                if let Err(error) = services.webhooks.disable(&services.outbox.router, &webhook, &why).await {
                    tracing::error!("the webhook cannot be disabled: {error}");
                }
                let bury = || store.bury_delivery(*key, &why);
                stored(services, "the end of an event for a webhook", bury).await;
            }
        }
    }
}

/// Seconds, or a date.
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
    fn a_receiver_says_when_in_seconds_or_as_a_date() {
        assert_eq!(retry_after_ms("120", 0), Some(120_000));
        let now_ms = 1_445_412_480_000;
        assert_eq!(retry_after_ms("Wed, 21 Oct 2015 07:28:30 GMT", now_ms), Some(30_000));
        assert_eq!(retry_after_ms("Wed, 21 Oct 2015 07:27:00 GMT", now_ms), Some(0), "it has passed");
        assert_eq!(retry_after_ms(&u64::MAX.to_string(), 0), Some(MAX_RETRY_AFTER_MS));
        assert_eq!(retry_after_ms("soon", 0), None);
    }
}
