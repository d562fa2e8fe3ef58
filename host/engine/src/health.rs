//! The health of a replica. A failed step fails only its own requests; several failed steps in a row mean that
//! the executor is broken, and the replica is not ready until a step succeeds. The loop runs a probe step when
//! it has nothing else to do, so that a replica that receives no more requests can recover.

use std::sync::{Mutex, PoisonError};

/// Number of steps in a row that must fail before the executor counts as broken.
const FAILED_STEPS: u32 = 3;

#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<Failures>);

#[derive(Debug, Default)]
struct Failures {
    in_a_row: u32,
    last: String,
}

impl Health {
    /// Records a step that succeeded, which makes the replica ready again.
    pub fn record_step(&self) {
        self.failures().in_a_row = 0;
    }

    /// Records a step that failed. Several in a row make the replica not ready, for the reason `error`.
    pub fn record_failed_step(&self, error: &str) {
        let mut failures = self.failures();
        failures.in_a_row = failures.in_a_row.saturating_add(1);
        failures.last = error.to_string();
    }

    /// Returns the reason that the replica is not ready, if it is not.
    pub fn problem(&self) -> Option<String> {
        let Failures { in_a_row, last } = &*self.failures();
        (*in_a_row >= FAILED_STEPS).then(|| format!("the last {in_a_row} steps failed: {last}"))
    }

    fn failures(&self) -> std::sync::MutexGuard<'_, Failures> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn consecutive_failures_count_until_one_success() {
        let health = Health::default();
        health.record_failed_step("first");
        health.record_failed_step("second");
        assert_eq!(health.problem(), None);
        health.record_step();
        (0..FAILED_STEPS).for_each(|_| health.record_failed_step("no memory"));
        assert_eq!(health.problem().as_deref(), Some("the last 3 steps failed: no memory"));
        health.record_step();
        assert_eq!(health.problem(), None);
    }
}
