//! The health of a replica. A failed step fails only its own requests; several failed steps in a row mean that
//! the executor is broken, and the replica is not ready until a step succeeds. The loop runs a probe step when
//! it has nothing else to do, so that a replica that receives no more requests can recover.
//!
//! After a fault, such as the loss of its device, an executor computes nothing more, and the replica is not ready before it
//! has a new one.

use std::sync::{Mutex, PoisonError};

/// Number of steps in a row that must fail before the executor counts as broken.
const FAILED_STEPS: u32 = 3;

#[derive(Debug, Default)]
pub(crate) struct Health(Mutex<Failures>);

#[derive(Debug, Default)]
struct Failures {
    in_a_row: u32,
    last: String,
    /// Why the replica has no working executor, if it has none.
    fault: Option<String>,
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

    /// Records that the executor computes nothing more, for the reason `fault`, or why it has not been replaced yet.
    pub fn record_fault(&self, fault: String) {
        self.failures().fault = Some(fault);
    }

    /// Records that the replica has a new executor.
    pub fn record_replacement(&self) {
        *self.failures() = Failures::default();
    }

    /// Returns why the replica has no working executor, if it has none.
    pub fn fault(&self) -> Option<String> {
        self.failures().fault.clone()
    }

    /// Returns the reason that the replica is not ready, if it is not.
    pub fn problem(&self) -> Option<String> {
        let Failures { in_a_row, last, fault } = &*self.failures();
        if fault.is_some() {
            return fault.clone();
        }
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

    #[test]
    fn a_fault_stays_until_the_executor_is_replaced() {
        let health = Health::default();
        assert_eq!(health.fault(), None);
        health.record_fault("the device is lost".to_owned());
        health.record_step();
        assert_eq!(health.problem().as_deref(), Some("the device is lost"));
        health.record_fault("it is still lost".to_owned());
        assert_eq!(health.fault().as_deref(), Some("it is still lost"));
        health.record_replacement();
        assert_eq!(health.problem(), None);
    }
}
