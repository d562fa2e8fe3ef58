//! Webhooks and dead letters as the operator sees them.

use super::AgentHost;
use crate::{DeadLetter, NewWebhook, RuntimeError, WebhookState, WebhookSummary, WebhookTest};
use skep_store::DeliveryKey;

const MAX_PAGE: u32 = 1_000;

impl AgentHost {
    /// Subscribes an address to topics. The second value is the secret that its messages are signed with, which is told
    /// only here.
    pub async fn add_webhook(&self, webhook: NewWebhook) -> Result<(WebhookSummary, String), RuntimeError> {
        let services = &self.inner.services;
        services.webhooks.add(&services.outbox.router, webhook).await
    }

    /// By id, and so the oldest first.
    pub fn webhooks(&self) -> Vec<WebhookSummary> {
        self.inner.services.webhooks.list()
    }

    /// As [`AgentHost::webhooks`], with what is on its way to each.
    pub async fn webhook_states(&self) -> Result<Vec<WebhookState>, RuntimeError> {
        Ok(self.inner.services.webhooks.states().await?)
    }

    /// Sends a webhook one test event, now and once.
    pub async fn test_webhook(&self, id: &str) -> Result<WebhookTest, RuntimeError> {
        self.inner.services.webhooks.test(id).await
    }

    /// Removes a webhook, with what is on its way to it.
    pub async fn remove_webhook(&self, id: &str) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        services.webhooks.remove(&services.outbox.router, id).await
    }

    /// Deliveries, to sessions and to webhooks, that failed for good; the newest first, those before `before`.
    pub async fn dead_letters(
        &self,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Vec<DeadLetter>, RuntimeError> {
        let before = before.map(DeliveryKey);
        let rows = self.inner.services.store.dead_deliveries(before, limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(DeadLetter::of).collect())
    }

    /// Tries a dead letter again, from its first try.
    pub async fn redeliver(&self, id: i64) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        if !services.store.redeliver(DeliveryKey(id), services.clock.now_ms()).await? {
            return Err(RuntimeError::DeadLetterNotFound { id });
        }
        services.courier_bell.notify_one();
        Ok(())
    }
}
