//! The number of instances that exist at once.
//!
//! A turn that waits for a turn of another agent keeps its instance. To prevent a deadlock in which waiting turns hold
//! every slot, each call depth has a few reserved slots that turns above it never take: the deepest turn waits for nobody,
//! so it finishes, and then the others do, one after the other. No tenant gets the last of the shared slots.

use crate::{
    invocation::MAX_DEPTH,
    metric,
    tenancy::{Tenancy, TenantPlace, TenantPlaces},
};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Reserved slots for each depth, in addition to those that all turns share.
const OWN: usize = 2;
/// Reserved slots of all depths together.
pub(crate) const OWN_OF_ALL_DEPTHS: usize = OWN * MAX_DEPTH;

pub(crate) struct InstancePlaces {
    shared: TenantPlaces,
    /// Reserved slots for turns that one other turn waits for, that two others wait for, and so on.
    own: [Arc<Semaphore>; MAX_DEPTH],
}

/// The permit that an [`InstancePlace`] returns when it is dropped.
enum Held {
    Shared(#[expect(dead_code, reason = "dropping it returns the slot")] TenantPlace),
    Own(#[expect(dead_code, reason = "dropping it returns the slot")] OwnedSemaphorePermit),
}

/// A slot in which an instance runs. Dropping it frees the slot.
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

    /// Waits for a slot for a tenant's turn that `depth` other turns wait for.
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
