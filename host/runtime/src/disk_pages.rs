//! KV pages in memory and on disk: they are erased with the sessions and agents that they were computed for.
//!
//! Invariant: pages that are read ahead of a turn do not outlive an erasure that they were read during.

use crate::{
    RuntimeError,
    tenancy::{Tenancy, TenantPermit, TenantPermits},
};
use skep_engine::{DiskTier, EraseScope, ModelSet, Pin, PinError, PinStatus, TierStatus, WeakModelSet};
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering::SeqCst},
};

/// Number of sessions whose pages are read ahead at once; each tenant has a share.
const READ_AHEAD: usize = 8;

/// The tier on disk, if the host has one.
pub(crate) struct DiskPages {
    tier: Option<Arc<DiskTier>>,
    models: WeakModelSet,
    permits: TenantPermits,
    /// Sessions whose pages are being read ahead, and those that ever were.
    reading: AtomicU64,
    begun: AtomicU64,
}

/// A session whose pages are being read ahead.
pub(crate) struct ReadAhead<'a> {
    disk: &'a DiskPages,
    _permit: TenantPermit,
}

impl Drop for ReadAhead<'_> {
    fn drop(&mut self) {
        self.disk.reading.fetch_sub(1, SeqCst);
    }
}

impl DiskPages {
    pub(crate) fn new(tier: Option<Arc<DiskTier>>, models: &ModelSet, tenancy: Tenancy) -> Self {
        let permits = TenantPermits::new(READ_AHEAD, tenancy);
        let (reading, begun) = Default::default();
        DiskPages { tier, models: models.downgrade(), permits, reading, begun }
    }

    pub(crate) fn status(&self) -> Option<TierStatus> {
        self.tier.as_ref().map(|tier| tier.status())
    }

    /// Waits until the pages of one more session of the tenant may be read ahead.
    pub(crate) async fn read_ahead(&self, tenant: &str) -> ReadAhead<'_> {
        let permit = self.permits.take(tenant).await;
        self.begun.fetch_add(1, SeqCst);
        self.reading.fetch_add(1, SeqCst);
        ReadAhead { disk: self, _permit: permit }
    }

    /// Erases pages from memory and from the disk, those included that wait to be written. Returns the number of pages that
    /// were on disk.
    pub(crate) async fn erase(&self, pages: EraseScope) -> u64 {
        let (begun, was_reading) = (self.begun.load(SeqCst), self.reading.load(SeqCst) > 0);
        self.forget(&pages).await;
        let Some(tier) = self.tier.clone() else { return 0 };
        let erasing = pages.clone();
        // It waits for the disk.
        let erased = tokio::task::spawn_blocking(move || erasing.erase_from(&tier)).await;
        if was_reading || self.begun.load(SeqCst) != begun {
            // Pages that were read from the disk meanwhile may be in memory again.
            self.forget(&pages).await;
        }
        erased.unwrap_or_else(|error| {
            tracing::error!(%error, "erasing KV pages panicked");
            0
        })
    }

    pub(crate) async fn erase_session(&self, agent: &str, session: &str) {
        let (agent, session) = (agent.to_owned(), session.to_owned());
        self.erase(EraseScope::Session { agent, session }).await;
    }

    /// Pins a session or undoes a pin. Returns whether that changed anything.
    pub(crate) async fn set_pin(&self, pin: Pin, is_pinned: bool) -> Result<bool, RuntimeError> {
        let tier = self.tier.clone().ok_or(RuntimeError::KvDiskOff)?;
        // It waits for the disk.
        let set = tokio::task::spawn_blocking(move || match is_pinned {
            true => tier.pin(pin),
            false => tier.unpin(&pin),
        });
        let set = set.await.map_err(|error| RuntimeError::Internal { message: error.to_string() })?;
        set.map_err(|error| match error {
            PinError::TooMany => RuntimeError::HostFull { message: error.to_string() },
            PinError::Name(_) | PinError::Disk(_) => RuntimeError::Internal { message: error.to_string() },
        })
    }

    pub(crate) fn pins(&self) -> Vec<PinStatus> {
        self.tier.as_ref().map_or_else(Vec::new, |tier| tier.pins())
    }

    async fn forget(&self, pages: &EraseScope) {
        if let Some(models) = self.models.upgrade() {
            for engine in models.engines() {
                engine.forget_pages(pages).await;
            }
        }
    }
}
