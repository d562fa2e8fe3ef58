//! The lease of a host: the time for which it is certain to be the only host of its database.
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
/// Time after the last renewal at which other members of a cluster count a host as dead that does not hold its lock, by the
/// clock of the server. It is long enough for a host that lost its connection to connect again.
pub(super) const SILENCE: Duration = Duration::from_millis(1_500);

/// The times of a lease.
#[derive(Clone, Copy, Debug)]
struct Terms {
    /// Time without a transaction after which the lease is renewed.
    renewal: Duration,
    /// Time after the last renewal for which the host itself relies on the lease.
    certain: Duration,
}

const ALONE: Terms = Terms { renewal: Duration::from_secs(2), certain: Duration::from_secs(8) };
/// Other members take over after [`SILENCE`] if the connection of the host is lost, which it may not notice.
const MEMBER: Terms = Terms { renewal: Duration::from_millis(500), certain: Duration::from_millis(1_200) };

/// The lease of one host. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Lease {
    terms: Terms,
    renewed: Arc<Mutex<Option<Instant>>>,
}

impl Default for Lease {
    fn default() -> Self {
        Lease { terms: ALONE, renewed: Arc::default() }
    }
}

impl Lease {
    /// Returns the lease of one of several hosts, which was never renewed.
    pub(super) fn of_member() -> Self {
        Lease { terms: MEMBER, ..Lease::default() }
    }

    /// Records a renewal that was begun at this time and that the server has confirmed.
    pub(super) fn renewed(&self, begun: Instant) {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = Some(begun);
    }

    /// Gives up the lease for good.
    pub(super) fn end(&self) {
        *self.renewed.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Returns the time without a transaction after which the lease is renewed.
    pub(super) fn renewal(&self) -> Duration {
        self.terms.renewal
    }

    /// Returns whether no other host can have taken over.
    pub(crate) fn is_certain(&self) -> bool {
        self.is_newer_than(self.terms.certain)
    }

    /// Returns whether the lease should be renewed now.
    pub(super) fn is_due(&self) -> bool {
        !self.is_newer_than(self.terms.renewal)
    }

    fn is_newer_than(&self, age: Duration) -> bool {
        let renewed = *self.renewed.lock().unwrap_or_else(PoisonError::into_inner);
        renewed.is_some_and(|begun| begun.elapsed() < age)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_certain_for_less_time_than_others_wait() {
        for (lease, others_wait) in [(Lease::default(), LEASE), (Lease::of_member(), SILENCE)] {
            let Terms { renewal, certain } = lease.terms;
            assert!(!lease.is_certain(), "it was never renewed");
            lease.renewed(Instant::now());
            assert!(lease.is_certain() && !lease.is_due());
            lease.renewed(Instant::now() - certain);
            assert!(!lease.is_certain());
            lease.renewed(Instant::now());
            lease.end();
            assert!(!lease.is_certain());
            assert!(renewal * 2 < certain && certain < others_wait);
        }
    }
}
