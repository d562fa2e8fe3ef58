//! Clocks of a guest: every reading is in the journal, so that a turn that is run again reads the same times.

use super::{Identity, Journal};
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};
use wasmtime_wasi::clocks::{HostMonotonicClock, HostWallClock};

const RESOLUTION_NS: u64 = 1_000;

/// The time of day.
pub(crate) struct WallClock(pub(crate) Arc<Journal>);

/// Nanoseconds of the turn. After a restart it goes on from the last reading, and never backwards.
pub(crate) struct MonotonicClock {
    journal: Arc<Journal>,
    last: Mutex<(u64, Instant)>,
}

impl MonotonicClock {
    pub(crate) fn new(journal: Arc<Journal>) -> Self {
        MonotonicClock { journal, last: Mutex::new((0, Instant::now())) }
    }
}

impl HostWallClock for WallClock {
    fn resolution(&self) -> Duration {
        Duration::from_nanos(RESOLUTION_NS)
    }

    fn now(&self) -> Duration {
        let now = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        read(&self.0, "wall-clock.now", now)
    }
}

impl HostMonotonicClock for MonotonicClock {
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

/// A clock cannot say that the turn must stop; the journal knows, and the turn fails when the guest next comes out.
fn read<T: serde::Serialize + serde::de::DeserializeOwned + Copy>(
    journal: &Arc<Journal>,
    name: &'static str,
    now: impl Fn() -> T,
) -> T {
    journal.immediate(Identity::new(name, &()), &now).unwrap_or_else(|_stopped| now())
}
