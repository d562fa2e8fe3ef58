//! How many instances there are at once.
//!
//! A turn that waits for a turn of another agent keeps its instance. So that those that wait cannot take every place from
//! those that they wait for, each depth of calls has a few places that turns above it never take: whoever is called the
//! deepest waits for nobody, so it ends, and so do the others, one after the other.

use crate::{host_tools::MAX_DEPTH, metric};
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Of each depth, beside those that all turns share.
const OWN: usize = 2;
/// What the places of all depths come to.
pub(crate) const OWN_OF_ALL_DEPTHS: usize = OWN * MAX_DEPTH;

pub(crate) struct InstancePlaces {
    shared: Arc<Semaphore>,
    /// Of the turns that one other waits for, that two others wait for, and so on.
    own: [Arc<Semaphore>; MAX_DEPTH],
}

/// A place to run an instance in.
pub(crate) struct InstancePlace {
    _permit: OwnedSemaphorePermit,
}

impl InstancePlaces {
    pub(crate) fn new(shared: usize) -> Self {
        InstancePlaces {
            shared: Arc::new(Semaphore::new(shared.max(1))),
            own: std::array::from_fn(|_| Arc::new(Semaphore::new(OWN))),
        }
    }

    /// Waits for a place for a turn that `depth` others wait for.
    pub(crate) async fn take(&self, depth: usize) -> InstancePlace {
        let shared = self.shared.clone().acquire_owned();
        let own = depth.checked_sub(1).map(|index| self.own[index.min(MAX_DEPTH - 1)].clone());
        let permit = match own {
            None => shared.await,
            Some(own) => tokio::select! {
                biased;
                permit = shared => permit,
                permit = own.acquire_owned() => permit,
            },
        };
        metrics::gauge!(metric::INSTANCES).increment(1.0);
        InstancePlace { _permit: permit.expect("the semaphores are never closed") }
    }
}

impl Drop for InstancePlace {
    fn drop(&mut self) {
        metrics::gauge!(metric::INSTANCES).decrement(1.0);
    }
}
