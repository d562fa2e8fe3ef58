//! How much of each kind is under way at once, and whose it is.
//!
//! A tenant may take a place while it has fewer than a few times as many as are free, so one with a long queue or a slow
//! receiver never has all of them and leaves some for whoever comes (Choudhury and Hahne, "Dynamic queue length thresholds
//! for shared-memory packet switches", 1998). What only waits for people gives its place back.

use crate::agent_host::Services;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Of each kind: alarms, events for sessions, events for webhooks.
const PLACES: usize = 64;
/// One tenant may have this many times as many places as are free: alone, three quarters of all.
const SHARE: usize = 3;

/// The places of one kind.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<Mutex<Taken>>);

#[derive(Default)]
struct Taken {
    all: usize,
    by_tenant: HashMap<String, usize>,
}

/// One place, until it is dropped; then the courier looks for what may begin.
pub(super) struct Place {
    places: Places,
    tenant: String,
    services: Arc<Services>,
}

impl Places {
    /// `None`: not now.
    pub(super) fn take(&self, tenant: &str, services: &Arc<Services>) -> Option<Place> {
        let may_take = self.lock().may_take(tenant);
        may_take.then(|| self.take_again(tenant, services))
    }

    /// For what had begun before, whatever the bound is.
    pub(super) fn take_again(&self, tenant: &str, services: &Arc<Services>) -> Place {
        self.lock().take(tenant);
        Place { places: self.clone(), tenant: tenant.to_owned(), services: services.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Taken> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Taken {
    fn may_take(&self, tenant: &str) -> bool {
        let free = PLACES.saturating_sub(self.all);
        self.by_tenant.get(tenant).copied().unwrap_or_default() < SHARE * free
    }

    fn take(&mut self, tenant: &str) {
        self.all += 1;
        *self.by_tenant.entry(tenant.to_owned()).or_default() += 1;
    }

    fn give_back(&mut self, tenant: &str) {
        self.all -= 1;
        if let Some(of_tenant) = self.by_tenant.get_mut(tenant) {
            *of_tenant -= 1;
            if *of_tenant == 0 {
                self.by_tenant.remove(tenant);
            }
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().give_back(&self.tenant);
        self.services.courier_bell.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take_all(taken: &mut Taken, tenant: &str) -> usize {
        let before = taken.all;
        while taken.may_take(tenant) {
            taken.take(tenant);
        }
        taken.all - before
    }

    #[test]
    fn a_tenant_takes_three_quarters_alone_and_leaves_some_for_whoever_comes() {
        let mut taken = Taken::default();
        let counts: Vec<usize> =
            ["greedy", "second", "third"].iter().map(|tenant| take_all(&mut taken, tenant)).collect();
        assert_eq!(counts, [48, 12, 3]);
        for _ in 0..40 {
            taken.give_back("greedy");
        }
        assert_eq!(take_all(&mut taken, "third"), 30, "what one gives back, another gets");
        assert!(taken.may_take("somebody new"));
    }
}
