//! KV pages in memory and on disk: they are erased with the sessions and agents that they were computed for.

use skep_engine::{DiskTier, EraseScope, ModelSet, TierStatus, WeakModelSet};
use std::sync::Arc;

/// The tier on disk, if the host has one.
pub(crate) struct DiskPages {
    tier: Option<Arc<DiskTier>>,
    models: WeakModelSet,
}

impl DiskPages {
    pub(crate) fn new(tier: Option<Arc<DiskTier>>, models: &ModelSet) -> Self {
        DiskPages { tier, models: models.downgrade() }
    }

    pub(crate) fn status(&self) -> Option<TierStatus> {
        self.tier.as_ref().map(|tier| tier.status())
    }

    /// Erases pages from memory and from the disk, those included that wait to be written. Returns the number of pages that
    /// were on disk.
    pub(crate) async fn erase(&self, pages: EraseScope) -> u64 {
        if let Some(models) = self.models.upgrade() {
            for engine in models.engines() {
                engine.forget_pages(&pages).await;
            }
        }
        let Some(tier) = self.tier.clone() else { return 0 };
        // It waits for the disk.
        let erased = tokio::task::spawn_blocking(move || pages.erase_from(&tier)).await;
        erased.unwrap_or_else(|error| {
            tracing::error!(%error, "erasing KV pages panicked");
            0
        })
    }

    pub(crate) async fn erase_session(&self, agent: &str, session: &str) {
        let (agent, session) = (agent.to_owned(), session.to_owned());
        self.erase(EraseScope::Session { agent, session }).await;
    }
}
