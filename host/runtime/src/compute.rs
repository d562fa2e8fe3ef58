//! Long CPU-bound work: rendering and encoding prompts, compiling constraints, parsing and checking large JSON. It runs on
//! separate threads, so that it does not block the threads that serve everyone else.
//!
//! There are twice as many slots as CPUs. With several tenants, a single tenant never takes the last slot, so another
//! tenant's work starts at once. Work that nobody waits for anymore is notified through its [`Cancel`], and keeps its slot
//! until it stops.

use crate::tenancy::Tenancy;
use skep_engine::Cancel;
use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
    thread,
};
use tokio::{
    runtime::{Handle, RuntimeFlavor},
    sync::Semaphore,
    task,
};
use tracing::Span;

/// Text up to this size is rendered and encoded in about a millisecond, and JSON up to this size is parsed and checked as
/// quickly. Such work runs on the caller's thread.
pub const QUICK_BYTES: usize = 16 << 10;
/// Number of tenants whose semaphores are kept; beyond it, those of tenants without running work are dropped.
const MAX_IDLE_TENANTS: usize = 1_024;

/// The compute slots of one host.
pub struct Compute {
    slots: Arc<Semaphore>,
    /// Number of slots that one tenant may have when there are several tenants.
    max_per_tenant: usize,
    tenancy: Tenancy,
    tenants: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// Cancels the work when dropped. It has no effect on work that has finished.
struct CancelOnDrop(Cancel);

impl Compute {
    pub(crate) fn new(tenancy: Tenancy) -> Self {
        // Twice as many as CPUs, so that short work makes progress beside long work.
        Self::with_slots(2 * thread::available_parallelism().map_or(1, usize::from), tenancy)
    }

    fn with_slots(slots: usize, tenancy: Tenancy) -> Self {
        let (max_per_tenant, slots) = (slots - 1, Arc::new(Semaphore::new(slots)));
        Compute { slots, max_per_tenant, tenancy, tenants: Mutex::default() }
    }

    /// Runs the work on another thread as soon as there is a slot. Dropping the future cancels the work.
    pub async fn run<T: Send + 'static>(
        &self,
        tenant: &str,
        work: impl FnOnce(&Cancel) -> T + Send + 'static,
    ) -> T {
        // The tenant's own slot comes first: work that waits for it does not block other tenants.
        let own = match self.tenancy.has_several() {
            true => {
                Some(self.tenant_slots(tenant).acquire_owned().await.expect("the semaphore is never closed"))
            }
            false => None,
        };
        let slot = self.slots.clone().acquire_owned().await.expect("the semaphore is never closed");
        let guard = CancelOnDrop(Cancel::default());
        let (cancel, span) = (guard.0.clone(), Span::current());
        let working = task::spawn_blocking(move || {
            let _slots = (own, slot);
            span.in_scope(|| work(&cancel))
        });
        match working.await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The runtime is shutting down, and drops the waiting task too.
                Err(_cancelled) => std::future::pending().await,
            },
        }
    }

    /// Runs the work on the caller's thread if it is quick, and otherwise on another thread.
    pub async fn run_unless<T: Send + 'static>(
        &self,
        is_quick: bool,
        tenant: &str,
        work: impl FnOnce(&Cancel) -> T + Send + 'static,
    ) -> T {
        match is_quick {
            true => work(&Cancel::default()),
            false => self.run(tenant, work).await,
        }
    }

    fn tenant_slots(&self, tenant: &str) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if tenants.len() > MAX_IDLE_TENANTS {
            tenants.retain(|_, own| Arc::strong_count(own) > 1);
        }
        let own = tenants.entry(tenant.to_owned());
        own.or_insert_with(|| Arc::new(Semaphore::new(self.max_per_tenant))).clone()
    }
}

/// Runs work on `bytes` bytes that blocks the caller. If it is long, the runtime moves the thread's other tasks elsewhere
/// first.
pub(crate) fn in_place<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let is_long = bytes > QUICK_BYTES;
    let can_move =
        || Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if is_long && can_move() { task::block_in_place(work) } else { work() }
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn two_slots() -> Compute {
        let tenancy = Tenancy::default();
        tenancy.set_several(true);
        Compute::with_slots(2, tenancy)
    }

    /// Returns work that runs until the sender sends or is dropped.
    fn held() -> (mpsc::Sender<()>, impl FnOnce(&Cancel) + Send + 'static) {
        let (release, wait) = mpsc::channel::<()>();
        (release, move |_: &Cancel| _ = wait.recv())
    }

    #[tokio::test]
    async fn one_tenant_never_takes_the_last_slot() {
        let compute = Arc::new(two_slots());
        let (release, first) = held();
        let busy = tokio::spawn({
            let compute = compute.clone();
            async move { compute.run("a", first).await }
        });
        while compute.slots.available_permits() == 2 {
            tokio::task::yield_now().await;
        }
        let behind = tokio::spawn({
            let compute = compute.clone();
            async move { compute.run("a", |_| 2).await }
        });
        assert_eq!(compute.run("b", |_| 3).await, 3, "another tenant's work starts at once");
        assert!(!behind.is_finished());
        release.send(()).expect("the work waits");
        busy.await.expect("the task finished");
        assert_eq!(behind.await.expect("the task finished"), 2);
    }

    #[tokio::test]
    async fn abandoned_work_is_cancelled_and_keeps_its_slot_until_it_stops() {
        let compute = Arc::new(two_slots());
        let (reports, reported) = mpsc::channel();
        let (release, wait) = mpsc::channel::<()>();
        let working = tokio::spawn({
            let compute = compute.clone();
            async move {
                let work = move |cancel: &Cancel| {
                    while !cancel.is_cancelled() {
                        std::thread::yield_now();
                    }
                    reports.send(()).expect("the test waits");
                    let _ = wait.recv();
                };
                compute.run("a", work).await;
            }
        });
        while compute.slots.available_permits() == 2 {
            tokio::task::yield_now().await;
        }
        working.abort();
        assert!(working.await.expect_err("aborted").is_cancelled());
        tokio::task::spawn_blocking(move || reported.recv())
            .await
            .expect("no panic")
            .expect("the work noticed the cancellation");
        assert_eq!(compute.slots.available_permits(), 1);
        drop(release);
        assert_eq!(compute.run("a", |_| 1).await, 1, "the slot is free again");
    }
}
