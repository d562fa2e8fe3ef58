//! Batches as the host takes them; see `batch`.

use super::AgentHost;
use crate::{BatchResults, BatchStatus, NewBatch, RuntimeError};

impl AgentHost {
    /// Stores requests that are worked off when there is room. They are durable when this returns.
    pub async fn queue_batch(&self, batch: NewBatch) -> Result<BatchStatus, RuntimeError> {
        self.inner.batches.queue(self, batch).await
    }

    /// How a batch of this principal stands.
    pub async fn batch(&self, principal: &str, id: &str) -> Result<BatchStatus, RuntimeError> {
        self.inner.batches.status(self, principal, id).await
    }

    /// The same, with the results if it has ended.
    pub async fn batch_results(
        &self,
        principal: &str,
        id: &str,
    ) -> Result<(BatchStatus, Option<BatchResults>), RuntimeError> {
        self.inner.batches.results(self, principal, id).await
    }

    /// Cancels what has not ended of a batch; one that has ended stays as it is.
    pub async fn cancel_batch(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        self.inner.batches.cancel(self, principal, id).await
    }
}
