//! Work that a restored host holds back because it was in flight when the backup was taken and may
//! have completed afterwards.
//!
//! A session with a held turn accepts nothing new, so that the turn finds the session unchanged
//! when it is resumed.

use super::{AgentHost, Inner};
use crate::RuntimeError;
use skep_store::{Held, Release};
use std::collections::HashSet;

impl AgentHost {
    /// Returns the work that is held since a restore. `None` if the host was not restored, or if
    /// the operator has already resumed or dropped the work.
    pub async fn held(&self) -> Result<Option<Held>, RuntimeError> {
        Ok(self.host().store.held().await?)
    }

    /// Resumes everything that is held. Webhook messages are marked as possible duplicates, and an
    /// interrupted call is reported to its agent as `interrupted`.
    pub async fn resume_held(&self) -> Result<Held, RuntimeError> {
        let (host, _one) = (self.host(), self.inner.holding.lock().await);
        let held = self.inner.held().await?;
        host.store.release(Release::Resume, host.clock.now_ms()).await?;
        host.store.release_work().await?;
        host.store.end_hold().await?;
        self.inner.dispatch.admission.held.set(HashSet::new());
        self.inner.dispatch.adopt_turns(None).await?;
        self.inner.batches.look();
        host.outbox.ring();
        Ok(held)
    }

    /// Drops everything that is held: turns fail with `turn_dropped` and keep their keys,
    /// deliveries become dead letters, batches are cancelled, and repeating schedules continue with
    /// their next time.
    pub async fn drop_held(&self) -> Result<Held, RuntimeError> {
        let (host, _one) = (self.host(), self.inner.holding.lock().await);
        let held = self.inner.held().await?;
        for turn in host.store.held_turns().await? {
            self.inner.dispatch.drop_turn(turn).await;
        }
        for (principal, id) in host.store.held_batches().await? {
            if let Err(error) = self.inner.batches.cancel(&principal, &id).await {
                tracing::error!(batch = id, "cannot cancel the batch, so it continues: {error}");
            }
        }
        host.store.release(Release::Drop, host.clock.now_ms()).await?;
        host.store.release_work().await?;
        host.store.end_hold().await?;
        self.inner.dispatch.admission.held.set(HashSet::new());
        host.outbox.ring();
        Ok(held)
    }
}

impl Inner {
    async fn held(&self) -> Result<Held, RuntimeError> {
        self.dispatch.host.store.held().await?.ok_or(RuntimeError::NothingHeld)
    }
}
