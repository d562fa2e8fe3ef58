//! The number of instances that exist at once.
//!
//! A turn that waits for a turn of another agent keeps its instance. To prevent a deadlock in which waiting turns hold
//! every slot, each call depth has a few reserved slots that turns above it never take: the deepest turn waits for nobody,
//! so it finishes, and then the others do, one after the other. No tenant gets the last of the shared slots.

use crate::{
    invocation::MAX_DEPTH,
    metric,
    tenancy::{Tenancy, TenantPermit, TenantPermits},
};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Reserved slots for each depth, in addition to those that all turns share.
const RESERVED_PER_DEPTH: usize = 2;
/// Reserved slots of all depths together.
pub(crate) const RESERVED_SLOTS: usize = RESERVED_PER_DEPTH * MAX_DEPTH;

pub(crate) struct InstanceSlots {
    shared: TenantPermits,
    /// Reserved slots for turns that one other turn waits for, that two others wait for, and so on.
    reserved: [Arc<Semaphore>; MAX_DEPTH],
}

/// The permit that an [`InstanceSlot`] returns when it is dropped.
enum Held {
    Shared(#[expect(dead_code, reason = "dropping it returns the slot")] TenantPermit),
    Reserved(#[expect(dead_code, reason = "dropping it returns the slot")] OwnedSemaphorePermit),
}

/// A slot in which an instance runs. Dropping it frees the slot.
pub(crate) struct InstanceSlot {
    _held: Held,
}

impl InstanceSlots {
    pub(crate) fn new(shared: usize, tenancy: Tenancy) -> Self {
        InstanceSlots {
            shared: TenantPermits::new(shared, tenancy),
            reserved: std::array::from_fn(|_| Arc::new(Semaphore::new(RESERVED_PER_DEPTH))),
        }
    }

    /// Returns how many of the shared slots are taken, and how many there are.
    pub(crate) fn taken(&self) -> (usize, usize) {
        self.shared.taken()
    }

    /// Waits for a slot for a tenant's turn that `depth` other turns wait for.
    pub(crate) async fn take(&self, depth: usize, tenant: &str) -> InstanceSlot {
        let shared = self.shared.take(tenant);
        let reserved = depth.checked_sub(1).map(|index| self.reserved[index.min(MAX_DEPTH - 1)].clone());
        let held = match reserved {
            None => Held::Shared(shared.await),
            Some(reserved) => tokio::select! {
                biased;
                slot = shared => Held::Shared(slot),
                permit = reserved.acquire_owned() => Held::Reserved(permit.expect("the semaphores are never closed")),
            },
        };
        metrics::gauge!(metric::INSTANCES).increment(1.0);
        InstanceSlot { _held: held }
    }
}

impl Drop for InstanceSlot {
    fn drop(&mut self) {
        metrics::gauge!(metric::INSTANCES).decrement(1.0);
    }
}
