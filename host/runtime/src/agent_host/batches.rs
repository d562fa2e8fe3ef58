//! Asynchronous batches; see `batch`.

use super::AgentHost;
use crate::{BatchResults, BatchStatus, NewBatch, RuntimeError};

impl AgentHost {
    /// Queues requests that are processed when capacity is free. They are durable when this
    /// returns.
    pub async fn queue_batch(&self, batch: NewBatch) -> Result<BatchStatus, RuntimeError> {
        self.inner.batches.queue(batch).await
    }

    /// Returns the state of a batch of this principal.
    pub async fn batch(&self, principal: &str, id: &str) -> Result<BatchStatus, RuntimeError> {
        self.inner.batches.status(principal, id).await
    }

    /// Returns the state of a batch, with its results if it has ended.
    pub async fn batch_results(
        &self,
        principal: &str,
        id: &str,
    ) -> Result<(BatchStatus, Option<BatchResults>), RuntimeError> {
        self.inner.batches.results(principal, id).await
    }

    /// Cancels the unfinished items of a batch. A batch that has ended is left unchanged.
    pub async fn cancel_batch(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        self.inner.batches.cancel(principal, id).await
    }
}
