//! How many instances there are at once.
//!
//! A turn that waits for a turn of another agent keeps its instance. So that those that wait cannot take every place from
//! those that they wait for, each depth of calls has a few places that turns above it never take: whoever is called the
//! deepest waits for nobody, so it ends, and so do the others, one after the other. Of those that all share, no tenant gets
//! the last ones.

use crate::{
    host_tools::MAX_DEPTH,
    metric,
    tenancy::{Tenancy, TenantPlace, TenantPlaces},
};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Of each depth, beside those that all turns share.
const OWN: usize = 2;
/// What the places of all depths come to.
pub(crate) const OWN_OF_ALL_DEPTHS: usize = OWN * MAX_DEPTH;

pub(crate) struct InstancePlaces {
    shared: TenantPlaces,
    /// Of the turns that one other waits for, that two others wait for, and so on.
    own: [Arc<Semaphore>; MAX_DEPTH],
}

/// What it gives back.
enum Held {
    Shared(#[expect(dead_code, reason = "dropping it gives the place back")] TenantPlace),
    Own(#[expect(dead_code, reason = "dropping it gives the place back")] OwnedSemaphorePermit),
}

/// A place to run an instance in.
pub(crate) struct InstancePlace {
    _held: Held,
}

impl InstancePlaces {
    pub(crate) fn new(shared: usize, tenancy: Tenancy) -> Self {
        InstancePlaces {
            shared: TenantPlaces::new(shared, tenancy),
            own: std::array::from_fn(|_| Arc::new(Semaphore::new(OWN))),
        }
    }

    /// Waits for a place for a turn of a tenant that `depth` others wait for.
    pub(crate) async fn take(&self, depth: usize, tenant: &str) -> InstancePlace {
        let shared = self.shared.take(tenant);
        let own = depth.checked_sub(1).map(|index| self.own[index.min(MAX_DEPTH - 1)].clone());
        let held = match own {
            None => Held::Shared(shared.await),
            Some(own) => tokio::select! {
                biased;
                place = shared => Held::Shared(place),
                permit = own.acquire_owned() => Held::Own(permit.expect("the semaphores are never closed")),
            },
        };
        metrics::gauge!(metric::INSTANCES).increment(1.0);
        InstancePlace { _held: held }
    }
}

impl Drop for InstancePlace {
    fn drop(&mut self) {
        metrics::gauge!(metric::INSTANCES).decrement(1.0);
    }
}
