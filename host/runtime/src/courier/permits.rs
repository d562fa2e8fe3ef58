//! Limits how many deliveries of each kind are in flight at once, in total and per tenant.
//!
//! Each tenant has its share of the permits (see [`crate::tenancy`]), so a tenant with a long queue
//! or a slow receiver never holds all of them. A delivery that only waits for people releases its
//! permit.

use crate::{courier::Context, tenancy::Shares};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Number of permits for each kind: alarms, events for sessions, and events for webhooks.
const PERMITS: usize = 64;

/// The permits of one kind.
#[derive(Clone, Default)]
pub(super) struct Permits(Arc<Mutex<Shares>>);

/// One permit. When it is dropped, the courier looks for deliveries that it can start.
pub(super) struct Permit {
    permits: Permits,
    tenant: String,
    context: Arc<Context>,
}

impl Permits {
    /// Takes a permit, or returns `None` if none is available to the tenant now.
    pub(super) fn take(&self, tenant: &str, context: &Arc<Context>) -> Option<Permit> {
        // Shares always apply, regardless of the number of tenants, because one permit more or less
        // costs nothing.
        let may_take = self.lock().may_take(tenant, 1, PERMITS, true);
        may_take.then(|| self.take_again(tenant, context))
    }

    /// Takes a permit for a row that was started before, regardless of the limit.
    pub(super) fn take_again(&self, tenant: &str, context: &Arc<Context>) -> Permit {
        self.lock().take(tenant, 1);
        Permit { permits: self.clone(), tenant: tenant.to_owned(), context: context.clone() }
    }

    fn lock(&self) -> MutexGuard<'_, Shares> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.permits.lock().give_back(&self.tenant, 1);
        self.context.outbox.ring();
    }
}
