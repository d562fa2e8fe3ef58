//! The primary contexts that this process uses, by device, and the faults that spoiled them.
//!
//! A device has one primary context per process, so a fault spoils it for all models on the device. Invariant: a spoiled
//! context gets no new user. It is destroyed with its last user, and the next one gets a fresh context. Any other context
//! stays until the process ends, because cuBLASLt keeps what it has loaded into a context, and would use it in a new one at
//! the same address.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::KernelError;

/// The contexts of this process.
pub(super) static CONTEXTS: Contexts = Contexts { used: Mutex::new(BTreeMap::new()) };

/// Contexts by the number of their device.
pub(super) struct Contexts {
    used: Mutex<BTreeMap<usize, Used>>,
}

#[derive(Default)]
struct Used {
    users: usize,
    /// Whether the context is retained once more than it has users.
    kept: bool,
    /// The first fault of the context.
    fault: Option<KernelError>,
}

impl Contexts {
    /// Adds a user, who gets the context that `retain` returns. Fails while a spoiled context still has users.
    pub(super) fn retain<T>(
        &self,
        ordinal: usize,
        retain: impl Fn() -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let mut used = self.lock();
        let context = used.entry(ordinal).or_default();
        if let Some(fault) = &context.fault {
            let reason = fault.to_string();
            return Err(KernelError::SpoiledContext { device: ordinal, users: context.users, reason });
        }
        if !context.kept {
            retain()?;
            context.kept = true;
        }
        let retained = retain()?;
        context.users += 1;
        Ok(retained)
    }

    /// Removes a user with `release`. `reset` then destroys a spoiled context without users.
    pub(super) fn release(&self, ordinal: usize, release: impl FnOnce(), reset: impl FnOnce()) {
        let mut used = self.lock();
        release();
        let Some(context) = used.get_mut(&ordinal) else { return };
        context.users = context.users.saturating_sub(1);
        if context.users == 0 && context.fault.is_some() {
            reset();
            used.remove(&ordinal);
        }
    }

    /// Records an error of a call. It spoils the context if no call can succeed after it.
    pub(super) fn record(&self, ordinal: usize, error: &KernelError) {
        if error.fault().is_some_and(crate::Fault::spoils_context)
            && let Some(context) = self.lock().get_mut(&ordinal)
        {
            context.fault.get_or_insert_with(|| error.clone());
        }
    }

    /// Returns the fault that spoiled the context, if one did.
    pub(super) fn fault(&self, ordinal: usize) -> Option<KernelError> {
        self.lock().get(&ordinal).and_then(|context| context.fault.clone())
    }

    fn lock(&self) -> MutexGuard<'_, BTreeMap<usize, Used>> {
        self.used.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;
    use crate::Fault;

    fn error(fault: Fault) -> KernelError {
        KernelError::DeviceFault { fault, call: "cuTest", reason: "a test".to_owned() }
    }

    #[test]
    fn a_spoiled_context_is_destroyed_with_its_last_user_and_gets_no_new_one() {
        let contexts = Contexts { used: Mutex::default() };
        let resets = Cell::new(0);
        let retain = |ordinal| contexts.retain(ordinal, || Ok(()));
        let release = |ordinal| contexts.release(ordinal, || (), || resets.set(resets.get() + 1));
        [3, 3, 4].into_iter().for_each(|ordinal| retain(ordinal).unwrap());
        contexts.record(3, &error(Fault::Memory));
        assert_eq!(contexts.fault(3), None, "the context itself works");
        contexts.record(3, &error(Fault::Context));
        contexts.record(3, &error(Fault::Device));
        assert_eq!(contexts.fault(3), Some(error(Fault::Context)), "the first fault counts");
        assert_eq!(contexts.fault(4), None);
        let refused = retain(3).unwrap_err();
        assert!(
            refused.to_string().contains("cuda:3") && refused.to_string().contains("a test"),
            "{refused}"
        );
        release(3);
        assert!(retain(3).is_err() && resets.get() == 0, "one user is left");
        release(3);
        assert_eq!((resets.get(), contexts.fault(3)), (1, None));
        retain(3).unwrap();
        release(3);
        release(4);
        assert_eq!(resets.get(), 1, "a context without a fault is not reset");
    }

    #[test]
    fn a_context_without_a_fault_is_retained_for_its_next_user() {
        let contexts = Contexts { used: Mutex::default() };
        let (retained, released) = (Cell::new(0), Cell::new(0));
        for _ in 0..3 {
            contexts.retain(0, || Ok(retained.set(retained.get() + 1))).unwrap();
            contexts.release(0, || released.set(released.get() + 1), || panic!("it works"));
        }
        assert_eq!((retained.get(), released.get()), (4, 3));
    }

    #[test]
    fn a_context_that_cannot_be_retained_has_no_user() {
        let contexts = Contexts { used: Mutex::default() };
        assert!(contexts.retain(0, || Err::<(), _>(error(Fault::Device))).is_err());
        contexts.record(0, &error(Fault::Device));
        contexts.release(0, || (), || ());
        assert!(contexts.retain(0, || Ok(())).is_ok());
    }
}
