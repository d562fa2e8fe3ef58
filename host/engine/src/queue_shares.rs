//! Who has how many of the places in a queue.
//!
//! Once requests of several tenants have come, one takes another place only while it has no more than a few times as many
//! as are free. So one that fills the queue leaves some places for whoever comes. An engine with one tenant has all of its
//! queue for that one.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A tenant may have this many times as many places as are free: alone, three quarters of all.
const SHARE: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct QueueShares(Mutex<Taken>);

#[derive(Debug, Default)]
struct Taken {
    all: usize,
    by_tenant: HashMap<String, usize>,
    /// The tenant that came first.
    first: Option<String>,
    has_several: bool,
}

impl QueueShares {
    /// Takes a place, if the tenant may have another.
    pub fn enter(&self, tenant: &str, max: usize) -> bool {
        let mut taken = self.lock();
        match &taken.first {
            None => taken.first = Some(tenant.to_string()),
            Some(first) => taken.has_several |= first != tenant,
        }
        let free = max.saturating_sub(taken.all);
        let had = taken.by_tenant.get(tenant).copied().unwrap_or_default();
        if free == 0 || taken.has_several && had >= SHARE * free {
            return false;
        }
        taken.all += 1;
        *taken.by_tenant.entry(tenant.to_string()).or_default() += 1;
        true
    }

    pub fn leave(&self, tenant: &str) {
        let mut taken = self.lock();
        taken.all -= 1;
        if let Some(of_tenant) = taken.by_tenant.get_mut(tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                taken.by_tenant.remove(tenant);
            }
        }
    }

    pub fn taken(&self) -> usize {
        self.lock().all
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fill(queue: &QueueShares, tenant: &str) -> usize {
        std::iter::repeat_n((), 100).take_while(|()| queue.enter(tenant, 64)).count()
    }

    #[test]
    fn the_only_tenant_has_the_whole_queue() {
        let queue = QueueShares::default();
        assert_eq!((fill(&queue, "a"), queue.taken()), (64, 64));
        queue.leave("a");
        assert_eq!(fill(&queue, "a"), 1);
    }

    #[test]
    fn a_tenant_that_fills_the_queue_leaves_places_to_others() {
        let queue = QueueShares::default();
        assert!(queue.enter("b", 64));
        queue.leave("b");
        assert_eq!(fill(&queue, "a"), 48);
        assert_eq!((fill(&queue, "b"), fill(&queue, "c")), (12, 3));
        (0..40).for_each(|_| queue.leave("a"));
        assert_eq!(fill(&queue, "c"), 30);
    }
}
