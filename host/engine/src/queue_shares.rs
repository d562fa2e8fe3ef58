//! The number of queue slots that each tenant holds.
//!
//! Once requests of several tenants have arrived, a tenant takes another slot only while it holds fewer than a
//! few times as many as are free. A tenant that fills the queue therefore leaves some slots for newcomers. In
//! an engine with one tenant, that tenant gets the whole queue.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A tenant may hold this many times as many slots as are free: alone, three quarters of all.
const SHARE: usize = 3;

#[derive(Debug, Default)]
pub(crate) struct QueueShares(Mutex<SlotCounts>);

#[derive(Debug, Default)]
struct SlotCounts {
    all: usize,
    by_tenant: HashMap<String, usize>,
    /// The tenant that came first.
    first: Option<String>,
    has_several: bool,
}

impl QueueShares {
    /// Takes a slot, if the tenant may have another.
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

    /// Frees a slot that `enter` gave to this tenant.
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

    /// Returns the number of slots that all tenants hold.
    pub fn taken(&self) -> usize {
        self.lock().all
    }

    fn lock(&self) -> MutexGuard<'_, SlotCounts> {
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
    fn a_single_tenant_gets_the_whole_queue() {
        let queue = QueueShares::default();
        assert_eq!((fill(&queue, "a"), queue.taken()), (64, 64));
        queue.leave("a");
        assert_eq!(fill(&queue, "a"), 1);
    }

    #[test]
    fn a_tenant_that_fills_the_queue_leaves_slots_for_others() {
        let queue = QueueShares::default();
        assert!(queue.enter("b", 64));
        queue.leave("b");
        assert_eq!(fill(&queue, "a"), 48);
        assert_eq!((fill(&queue, "b"), fill(&queue, "c")), (12, 3));
        (0..40).for_each(|_| queue.leave("a"));
        assert_eq!(fill(&queue, "c"), 30);
    }
}
