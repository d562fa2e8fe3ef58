//! The primary contexts that this process uses, by device, and the faults that spoiled them.
//!
//! A device has one primary context per process, so a fault spoils it for all models on the device, and the driver gives the
//! process no other one, even if the context is reset. Invariant: a spoiled context gets no new user. Contexts stay until the
//! process ends, because cuBLASLt keeps what it has loaded into a context, and would use it in a new one at the same address.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::KernelError;

/// The contexts of this process.
pub(super) static CONTEXTS: Contexts = Contexts { used: Mutex::new(BTreeMap::new()) };

/// Contexts by the number of their device. Each has a lock of its own, so that contexts are created at the same time.
pub(super) struct Contexts {
    used: Mutex<BTreeMap<usize, Arc<Mutex<Used>>>>,
}

#[derive(Default)]
struct Used {
    /// Says whether the process holds the context beside its users.
    kept: bool,
    /// The first fault of the context.
    fault: Option<KernelError>,
}

/// Returns the number of a device whose context is spoiled, and the error that spoiled it.
pub fn spoiled() -> Option<(usize, KernelError)> {
    let used: Vec<_> = lock(&CONTEXTS.used).iter().map(|(ordinal, used)| (*ordinal, used.clone())).collect();
    used.into_iter().find_map(|(ordinal, context)| Some((ordinal, lock(&context).fault.clone()?)))
}

impl Contexts {
    /// Returns the context that `retain` returns. Fails if the context is spoiled.
    pub(super) fn retain<T>(
        &self,
        ordinal: usize,
        retain: impl Fn() -> Result<T, KernelError>,
    ) -> Result<T, KernelError> {
        let context = lock(&self.used).entry(ordinal).or_default().clone();
        let mut context = lock(&context);
        if let Some(fault) = &context.fault {
            return Err(KernelError::SpoiledContext { device: ordinal, reason: fault.to_string() });
        }
        if !context.kept {
            retain()?;
            context.kept = true;
        }
        retain()
    }

    /// Records an error of a call. It spoils the context if no call can succeed after it.
    pub(super) fn record(&self, ordinal: usize, error: &KernelError) {
        if error.fault().is_some_and(crate::Fault::spoils_context)
            && let Some(context) = self.context(ordinal)
        {
            lock(&context).fault.get_or_insert_with(|| error.clone());
        }
    }

    /// Returns the fault that spoiled the context, if one did.
    pub(super) fn fault(&self, ordinal: usize) -> Option<KernelError> {
        self.context(ordinal).and_then(|context| lock(&context).fault.clone())
    }

    fn context(&self, ordinal: usize) -> Option<Arc<Mutex<Used>>> {
        lock(&self.used).get(&ordinal).cloned()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
    fn a_spoiled_context_gets_no_new_user() {
        let contexts = Contexts { used: Mutex::default() };
        let retain = |ordinal| contexts.retain(ordinal, || Ok(()));
        [3, 3, 4].into_iter().for_each(|ordinal| retain(ordinal).unwrap());
        contexts.record(3, &error(Fault::Memory));
        assert_eq!(contexts.fault(3), None, "the context itself works");
        contexts.record(3, &error(Fault::Context));
        contexts.record(3, &error(Fault::Device));
        assert_eq!(contexts.fault(3), Some(error(Fault::Context)), "the first fault counts");
        assert_eq!(contexts.fault(4), None);
        let refused = retain(3).unwrap_err().to_string();
        assert!(["cuda:3", "a test", "restart"].iter().all(|part| refused.contains(part)), "{refused}");
        retain(4).unwrap();
    }

    #[test]
    fn a_context_is_retained_once_for_the_process_and_once_for_each_user() {
        let contexts = Contexts { used: Mutex::default() };
        let retained = Cell::new(0);
        for _ in 0..3 {
            let count = || {
                retained.set(retained.get() + 1);
                Ok(())
            };
            contexts.retain(0, count).unwrap();
        }
        assert_eq!(retained.get(), 4);
    }

    #[test]
    fn contexts_of_different_devices_are_created_at_the_same_time() {
        let contexts = Contexts { used: Mutex::default() };
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for ordinal in 0..2 {
                let (contexts, both) = (&contexts, &both);
                // No context is there before both are about to be.
                scope.spawn(move || contexts.retain(ordinal, || Ok(both.wait())).unwrap());
            }
        });
    }

    #[test]
    fn a_context_that_could_not_be_retained_may_be_later() {
        let contexts = Contexts { used: Mutex::default() };
        assert!(contexts.retain(0, || Err::<(), _>(error(Fault::Memory))).is_err());
        assert!(contexts.retain(0, || Ok(())).is_ok());
    }
}
