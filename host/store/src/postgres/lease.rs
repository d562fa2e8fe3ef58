//! The lease of a host: the time for which it surely has its database for itself.
//!
//! Each transaction of a host renews the lease, and so does the writer when it has nothing to write. A host that did not
//! renew it for [`LEASE`] hangs, or was cut off, and another one may take its place. The host itself counts from before the
//! renewal was sent and gives up its claim earlier, so the two never believe in the same lease.

use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time after the last renewal at which another host may take over, by the clock of the server.
pub(super) const LEASE: Duration = Duration::from_secs(10);
/// Time after the last renewal for which the host itself relies on the lease.
const CERTAIN: Duration = Duration::from_secs(8);
/// Time without a transaction after which the lease is renewed.
pub(crate) const RENEWAL: Duration = Duration::from_secs(2);

/// The lease of one host. Clones share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Lease(Arc<Mutex<Option<Instant>>>);

impl Lease {
    /// Records a renewal that was begun at this time and that the server has confirmed.
    pub(super) fn renewed(&self, begun: Instant) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
    }

    /// Gives up the lease for good.
    pub(super) fn end(&self) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns whether no other host can have taken over.
    pub(crate) fn is_certain(&self) -> bool {
        self.is_newer_than(CERTAIN)
    }

    /// Returns whether the lease should be renewed now.
    pub(super) fn is_due(&self) -> bool {
        !self.is_newer_than(RENEWAL)
    }

    fn is_newer_than(&self, age: Duration) -> bool {
        let renewed = *self.0.lock().unwrap_or_else(PoisonError::into_inner);
        renewed.is_some_and(|begun| begun.elapsed() < age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_certain_for_less_time_than_others_wait() {
        let lease = Lease::default();
        assert!(!lease.is_certain(), "it was never renewed");
        lease.renewed(Instant::now());
        assert!(lease.is_certain() && !lease.is_due());
        lease.renewed(Instant::now() - CERTAIN);
        assert!(!lease.is_certain());
        lease.renewed(Instant::now());
        lease.end();
        assert!(!lease.is_certain());
        assert!(RENEWAL * 2 < CERTAIN && CERTAIN < LEASE);
    }
}
