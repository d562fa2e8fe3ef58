//! Webhooks and dead letters as the operator sees them.

use super::AgentHost;
use crate::{DeadLetter, NewWebhook, RuntimeError, WebhookState, WebhookSummary, WebhookTest};
use skep_store::DeliveryKey;

const MAX_PAGE: u32 = 1_000;

impl AgentHost {
    /// Subscribes an address to topics. The second value is the secret that signs its messages; it
    /// is returned only here.
    pub async fn add_webhook(&self, webhook: NewWebhook) -> Result<(WebhookSummary, String), RuntimeError> {
        let host = self.host();
        self.inner.webhooks.add(&host.outbox.router, webhook).await
    }

    /// Returns the webhooks ordered by id, which is oldest first.
    pub fn webhooks(&self) -> Vec<WebhookSummary> {
        self.inner.webhooks.list()
    }

    /// Lists what [`AgentHost::webhooks`] does, with the deliveries that are in flight to each.
    pub async fn webhook_states(&self) -> Result<Vec<WebhookState>, RuntimeError> {
        Ok(self.inner.webhooks.states().await?)
    }

    /// Sends one test event to a webhook immediately, without retries.
    pub async fn test_webhook(&self, id: &str) -> Result<WebhookTest, RuntimeError> {
        self.inner.webhooks.test(id).await
    }

    /// Removes a webhook and its pending deliveries.
    pub async fn remove_webhook(&self, id: &str) -> Result<(), RuntimeError> {
        let host = self.host();
        self.inner.webhooks.remove(&host.outbox.router, id).await
    }

    /// Returns deliveries to sessions and webhooks that failed permanently, newest first, or those
    /// before the key `before`.
    pub async fn dead_letters(
        &self,
        before: Option<i64>,
        limit: u32,
    ) -> Result<Vec<DeadLetter>, RuntimeError> {
        let before = before.map(DeliveryKey);
        let rows = self.host().store.dead_deliveries(before, limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(DeadLetter::of).collect())
    }

    /// Retries a dead letter from the first attempt.
    pub async fn redeliver(&self, id: i64) -> Result<(), RuntimeError> {
        let host = self.host();
        if !host.store.redeliver(DeliveryKey(id), host.clock.now_ms()).await? {
            return Err(RuntimeError::DeadLetterNotFound { id });
        }
        host.outbox.ring();
        Ok(())
    }
}
