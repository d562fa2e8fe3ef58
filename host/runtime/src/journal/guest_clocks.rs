//! The clocks of a guest. They show the host's time. Every reading is journaled, so that a rerun of
//! the turn reads the same times.

use super::{Identity, Journal};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};
use wasmtime_wasi::clocks::{HostMonotonicClock, HostWallClock};

const RESOLUTION_NS: u64 = 1_000;

/// The wall clock.
pub(crate) struct GuestWallClock(pub(crate) Arc<Journal>);

/// Nanoseconds since the turn started. After a restart it continues from the last reading and never
/// runs backwards.
pub(crate) struct GuestMonotonicClock {
    journal: Arc<Journal>,
    last: Mutex<(u64, Instant)>,
}

impl GuestMonotonicClock {
    pub(crate) fn new(journal: Arc<Journal>) -> Self {
        GuestMonotonicClock { journal, last: Mutex::new((0, Instant::now())) }
    }
}

impl HostWallClock for GuestWallClock {
    fn resolution(&self) -> Duration {
        Duration::from_nanos(RESOLUTION_NS)
    }

    fn now(&self) -> Duration {
        read(&self.0, "wall-clock.now", || self.0.clock.since_epoch())
    }
}

impl HostMonotonicClock for GuestMonotonicClock {
    fn resolution(&self) -> u64 {
        RESOLUTION_NS
    }

    fn now(&self) -> u64 {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let (value, at) = *last;
        let elapsed = || u64::try_from(at.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let now = read(&self.journal, "monotonic-clock.now", || value.saturating_add(elapsed()));
        *last = (now, Instant::now());
        now
    }
}

/// Reads a clock. A clock call cannot report that the turn must stop; the journal records the
/// failure, and the turn fails once the guest next returns to the host.
fn read<T: serde::Serialize + serde::de::DeserializeOwned + Copy>(
    journal: &Arc<Journal>,
    name: &'static str,
    now: impl Fn() -> T,
) -> T {
    journal.immediate(Identity::new(name, &()), &now).unwrap_or_else(|_stopped| now())
}
