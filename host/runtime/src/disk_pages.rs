//! KV pages in memory and on disk: they are erased with the sessions and agents that they were computed for.
//!
//! A host of a cluster also erases what others delete: it may have pages of sessions that moved, or that began with the same
//! words. It remembers in its tier which of these erasures it has made, so those that it was not there for are made when it
//! starts.
//!
//! Invariant: pages that are read ahead of a turn do not outlive an erasure that they were read during.

use crate::{
    RuntimeError,
    name::tenant_of,
    tenancy::{Tenancy, TenantPermit, TenantPermits},
};
use skep_engine::{DiskTier, EraseScope, ModelSet, Pin, PinError, PinStatus, TierStatus, WeakModelSet};
use skep_store::{PageErasure, PageErasures, Store};
use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};
use tokio::sync::Mutex;

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
    /// The number of the last erasure of other hosts that this one has made; `None` until it has looked.
    erased_until: Mutex<Option<u64>>,
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
        let (reading, begun, erased_until) = Default::default();
        DiskPages { tier, models: models.downgrade(), permits, reading, begun, erased_until }
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
    /// were on disk, which is 0 if the disk failed.
    pub(crate) async fn erase(&self, pages: EraseScope) -> u64 {
        self.try_erase(pages).await.unwrap_or_else(|error| {
            tracing::error!(%error, "KV pages are not erased from the disk");
            0
        })
    }

    /// Does the same, and reports a disk that failed.
    pub(crate) async fn try_erase(&self, pages: EraseScope) -> io::Result<u64> {
        let (begun, was_reading) = (self.begun.load(SeqCst), self.reading.load(SeqCst) > 0);
        self.forget(&pages).await;
        let Some(tier) = self.tier.clone() else { return Ok(0) };
        let erasing = pages.clone();
        // It waits for the disk.
        let erased = tokio::task::spawn_blocking(move || erasing.erase_from(&tier)).await;
        if was_reading || self.begun.load(SeqCst) != begun {
            // Pages that were read from the disk meanwhile may be in memory again.
            self.forget(&pages).await;
        }
        erased.map_err(io::Error::other)?
    }

    pub(crate) async fn erase_session(&self, agent: &str, session: &str) {
        let (agent, session) = (agent.to_owned(), session.to_owned());
        self.erase(EraseScope::Session { agent, session }).await;
    }

    /// Makes the erasures of other hosts that this one has not made yet. If the disk fails, they count as not made.
    pub(crate) async fn erase_as_others(&self, store: &Store) -> Result<(), RuntimeError> {
        let mut made = self.erased_until.lock().await;
        let tier = self.tier.as_deref();
        let since = match *made {
            Some(made) => Some(made),
            None => tier.and_then(|tier| {
                let recorded = tier.erased_until();
                recorded
                    .inspect_err(|error| tracing::warn!(%error, "cannot read what was erased"))
                    .ok()
                    .flatten()
            }),
        };
        let PageErasures { until, erased } = store.page_erasures(since).await?;
        let scopes = match erased {
            Some(erased) => scopes(erased),
            // A host that begins has no page that was erased elsewhere.
            None if since.is_none() && tier.is_none_or(|tier| tier.status().pages_at_start == 0) => {
                Vec::new()
            }
            None => {
                tracing::info!(
                    "erasing all KV pages of this host, because it is not known anymore what other hosts have deleted"
                );
                vec![EraseScope::EveryoneHere]
            }
        };
        let mut failed = None;
        for scope in scopes {
            failed = self.try_erase(scope).await.err().or(failed);
        }
        if let Some(error) = failed {
            let message = format!("KV pages that other hosts have deleted are not erased here: {error}");
            return Err(RuntimeError::Internal { message });
        }
        if since != Some(until)
            && let Some(tier) = self.tier.clone()
        {
            // It waits for the disk.
            let noted = tokio::task::spawn_blocking(move || tier.set_erased_until(until)).await;
            match noted {
                Ok(Ok(())) => {}
                Ok(Err(error)) => {
                    tracing::warn!(%error, "cannot note what was erased; it is erased again at the next start")
                }
                Err(error) => tracing::error!(%error, "noting what was erased panicked"),
            }
        }
        *made = Some(until);
        Ok(())
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

    /// Undoes the pin of a session that does not exist anymore.
    pub(crate) async fn forget_pin(&self, agent: &str, session: &str) {
        if let Err(error) = self.set_pin(pin_of(agent, session), false).await
            && !matches!(error, RuntimeError::KvDiskOff)
        {
            tracing::warn!(%error, agent, session, "the pin of a deleted session is left");
        }
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

/// Returns the pin of a session, whose id is that of the host.
pub(crate) fn pin_of(agent: &str, session: &str) -> Pin {
    Pin { tenant: tenant_of(session).to_owned(), agent: agent.to_owned(), session: session.to_owned() }
}

/// Returns the scopes of erasures. Sessions are erased together, because each scope costs a step of every engine, and thousands
/// of sessions may expire at once.
fn scopes(erased: Vec<PageErasure>) -> Vec<EraseScope> {
    let (mut scopes, mut sessions) = (Vec::new(), BTreeMap::<String, BTreeSet<String>>::new());
    for one in erased {
        match one {
            PageErasure::Session { agent, session } => {
                sessions.entry(agent).or_default().insert(session);
            }
            PageErasure::Agent { agent } => scopes.push(EraseScope::Agent(agent)),
            PageErasure::Tenant { tenant } => scopes.push(EraseScope::Tenant(tenant)),
        }
    }
    if !sessions.is_empty() {
        scopes.push(EraseScope::Sessions(Arc::new(sessions)));
    }
    scopes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sessions_that_others_deleted_are_erased_together() {
        let session = |agent: &str, session: &str| PageErasure::Session {
            agent: agent.to_owned(),
            session: session.to_owned(),
        };
        let agent = PageErasure::Agent { agent: "gone".to_owned() };
        let found = scopes(vec![session("a", "1"), agent, session("b", "1"), session("a", "2")]);
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let sessions = [("a".to_owned(), names(&["1", "2"])), ("b".to_owned(), names(&["1"]))];
        let sessions = EraseScope::Sessions(Arc::new(sessions.into()));
        assert_eq!(found, [EraseScope::Agent("gone".to_owned()), sessions]);
        assert!(scopes(Vec::new()).is_empty());
    }
}
