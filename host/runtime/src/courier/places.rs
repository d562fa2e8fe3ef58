//! How much of each kind is under way at once, and whose it is.
//!
//! Each tenant has its share of them (see [`crate::tenancy`]), so one with a long queue or a slow receiver never has all of
//! them. What only waits for people gives its place back.

use crate::{agent_host::Services, tenancy::Shares};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Of each kind: alarms, events for sessions, events for webhooks.
const PLACES: usize = 64;

/// The places of one kind.
#[derive(Clone, Default)]
pub(super) struct Places(Arc<Mutex<Shares>>);

/// One place, until it is dropped; then the courier looks for what may begin.
pub(super) struct Place {
    places: Places,
    tenant: String,
    services: Arc<Services>,
}

impl Places {
    /// `None`: not now.
    pub(super) fn take(&self, tenant: &str, services: &Arc<Services>) -> Option<Place> {
        // One place more or less costs nothing, so it does not matter how many tenants there are.
        let may_take = self.lock().may_take(tenant, 1, PLACES, true);
        may_take.then(|| self.take_again(tenant, services))
    }

    /// For what had begun before, whatever the bound is.
    pub(super) fn take_again(&self, tenant: &str, services: &Arc<Services>) -> Place {
        self.lock().take(tenant, 1);
        Place { places: self.clone(), tenant: tenant.to_owned(), services: services.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Shares> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.lock().give_back(&self.tenant, 1);
        self.services.courier_bell.notify_one();
    }
}
