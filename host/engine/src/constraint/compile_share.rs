//! Limits how much of the compiler one tenant uses at a time. Compiling a new constraint takes up to a second
//! of a core, and anyone who may send a request can send constraints.
//!
//! Invariant: however many new constraints one tenant sends at once, the constraints of others are compiled
//! alongside at most a few of them.

use std::collections::HashMap;
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::Duration;

use crate::EngineError;

/// Maximum number of one tenant's constraints that are compiled at the same time.
const AT_ONCE: usize = 2;
/// Longest wait for a slot, which is longer than most constraints take. A request that has to wait longer is
/// asked to retry.
const LONGEST_WAIT: Duration = Duration::from_millis(500);

#[derive(Default)]
pub(crate) struct CompileShares {
    /// Number of constraints that each tenant is compiling now.
    running: Mutex<HashMap<String, usize>>,
    freed: Condvar,
}

/// A slot at the compiler; dropping it frees the slot.
pub(crate) struct CompileSlot<'a> {
    shares: &'a CompileShares,
    tenant: String,
}

impl CompileShares {
    /// Waits for a slot, for a limited time.
    pub fn enter(&self, tenant: &str) -> Result<CompileSlot<'_>, EngineError> {
        self.enter_within(tenant, LONGEST_WAIT)
    }

    fn enter_within(&self, tenant: &str, wait: Duration) -> Result<CompileSlot<'_>, EngineError> {
        let running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        let is_full =
            |running: &mut HashMap<String, usize>| running.get(tenant).is_some_and(|count| *count >= AT_ONCE);
        let waited = self.freed.wait_timeout_while(running, wait, is_full);
        let (mut running, waited) = waited.unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() && is_full(&mut running) {
            return Err(EngineError::Busy { retry_after_ms: LONGEST_WAIT.as_millis() as u32 });
        }
        *running.entry(tenant.to_string()).or_default() += 1;
        Ok(CompileSlot { shares: self, tenant: tenant.to_string() })
    }
}

impl Drop for CompileSlot<'_> {
    fn drop(&mut self) {
        let mut running = self.shares.running.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = running.get_mut(&self.tenant) {
            *count -= 1;
            if *count == 0 {
                running.remove(&self.tenant);
            }
        }
        drop(running);
        self.shares.freed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tenant_waits_only_for_its_own_constraints() {
        let shares = CompileShares::default();
        let full: Vec<_> = (0..AT_ONCE).map(|_| shares.enter("a").unwrap()).collect();
        let refused = shares.enter_within("a", Duration::ZERO);
        assert!(matches!(refused.err(), Some(EngineError::Busy { .. })));
        assert!(shares.enter_within("b", Duration::ZERO).is_ok());
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| shares.enter_within("a", Duration::from_secs(60)).is_ok());
            drop(full);
            assert!(waiting.join().unwrap());
        });
        assert!(shares.running.lock().unwrap().is_empty());
    }
}
