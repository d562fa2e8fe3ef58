//! An event on its way to a webhook.

use super::{backoff::Backoff, count, places::Place};
use crate::{
    agent_host::Services,
    event::webhook::{Webhook, message, message_id},
    store_retry::stored,
};
use jiff::{Timestamp, fmt::rfc2822};
use skep_outbound::WebhookMessage;
use skep_store::{Delivery, StoreError, Target, WebhookTry};
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
    /// With this HTTP status.
    Done(u16),
    Failed {
        /// Of the HTTP answer, if there was one.
        status: Option<u16>,
        error: String,
        /// After this, if the receiver said so.
        retry_after_ms: Option<u64>,
    },
    /// Nothing is to be sent there any more.
    Gone(Arc<Webhook>),
    /// It was disabled meanwhile, and nothing was sent.
    Disabled(String),
}

impl WebhookDelivery {
    pub(super) async fn deliver(self, _place: Place) {
        let Target::Webhook(id) = &self.row.target else { return };
        // One that was removed took its deliveries along.
        let Some(webhook) = self.services.webhooks.get(id) else { return };
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
        let (services, store) = (&self.services, &self.services.store);
        // It is shown to people, and holds up nothing.
        if let Err(error) = self.note_try(id, &verdict).await {
            tracing::warn!(webhook = id, "the last try of a webhook cannot be stored: {error}");
        }
        match verdict {
            Verdict::Done(_) => {
                count("webhook", "ok");
                let finish = || store.finish_delivery(*key);
                stored(services, "the end of an event for a webhook", finish).await;
            }
            Verdict::Failed { error, retry_after_ms, .. } if *attempt < TRIES => {
                count("webhook", "retried");
                let wait_ms = BACKOFF.delay_ms(*attempt).max(retry_after_ms.unwrap_or(0));
                let wake_ms = services.clock.now_ms() + wait_ms;
                let put_off = || store.retry_delivery(*key, *attempt, wake_ms, &error);
                stored(services, "the next try of an event for a webhook", put_off).await;
            }
            Verdict::Failed { error, .. } | Verdict::Disabled(error) => {
                count("webhook", "failed");
                tracing::warn!(
                    webhook = id,
                    topic,
                    event,
                    "an event for a webhook is given up after {attempt} tries; `skep webhook redeliver {}` tries it \
                     again: {error}",
                    key.0
                );
                let bury = || store.bury_delivery(*key, &error);
                stored(services, "the end of an event for a webhook", bury).await;
            }
            Verdict::Gone(webhook) => {
                count("webhook", "failed");
                let why = gone(&webhook);
                tracing::warn!(webhook = id, "a webhook is disabled: {why}");
                if let Err(error) = services.webhooks.disable(&services.outbox.router, &webhook, &why).await {
                    tracing::error!("the webhook cannot be disabled: {error}");
                }
                let bury = || store.bury_delivery(*key, &why);
                stored(services, "the end of an event for a webhook", bury).await;
            }
        }
    }

    /// Keeps what came of the try, and says in the log when a webhook begins to fail and when it is well again.
    async fn note_try(&self, id: &str, verdict: &Verdict) -> Result<(), StoreError> {
        let (status, error) = match verdict {
            Verdict::Done(status) => (Some(*status), None),
            Verdict::Failed { status, error, .. } => (*status, Some(error.clone())),
            Verdict::Gone(webhook) => (Some(GONE), Some(gone(webhook))),
            Verdict::Disabled(_) => return Ok(()),
        };
        let webhooks = &self.services.webhooks;
        let last = WebhookTry { at_ms: self.services.clock.now_ms(), status, error: error.clone() };
        let before = webhooks.note_try(id, last).await?;
        let was_well = before.is_none_or(|before| before.error.is_none());
        match error {
            Some(error) if was_well => tracing::warn!(
                webhook = id,
                topic = self.row.topic,
                event = self.row.event_id,
                "a webhook fails; events for it are tried {TRIES} times over some hours: {error}"
            ),
            None if !was_well => tracing::info!(webhook = id, "a webhook takes events again"),
            _ => {}
        }
        Ok(())
    }
}

fn gone(webhook: &Webhook) -> String {
    format!("{} answered HTTP {GONE}: it is gone for good", webhook.summary.url)
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
