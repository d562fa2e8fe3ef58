//! Asynchronous batches; see `batch`.

use super::AgentHost;
use crate::{BatchOptions, BatchResults, BatchStatus, NewBatch, RuntimeError};

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

    /// Returns batches of this principal that have details, the newest first, before the batch with the id `before`.
    pub async fn detailed_batches(
        &self,
        principal: &str,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<BatchStatus>, RuntimeError> {
        self.inner.batches.detailed(principal, before, limit).await
    }

    /// Changes members of the details of a batch, as an RFC 7396 merge patch.
    pub async fn patch_batch_details(
        &self,
        principal: &str,
        id: &str,
        patch: &str,
    ) -> Result<(), RuntimeError> {
        self.inner.batches.patch_details(principal, id, patch).await
    }

    /// Removes the requests and results of a batch that has ended. Its counts stay.
    pub async fn empty_batch(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        self.inner.batches.empty(principal, id).await
    }

    /// Returns the bounds of batches.
    pub fn batch_options(&self) -> &BatchOptions {
        self.inner.batches.options()
    }

    /// Cancels the unfinished items of a batch. A batch that has ended is left unchanged.
    pub async fn cancel_batch(&self, principal: &str, id: &str) -> Result<(), RuntimeError> {
        self.inner.batches.cancel(principal, id).await
    }
}
