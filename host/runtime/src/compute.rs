//! Work that keeps a processor for long: rendering and encoding prompts, compiling constraints, reading and checking large
//! JSON. It runs on threads of its own, so that the threads which serve everyone else go on.
//!
//! Twice as much runs at once as there are processors, and of several tenants one never has the last place: whatever it asks for, another's
//! work begins at once. What nobody waits for any more is told so by its [`Cancel`], and keeps its place until it stops.

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

/// Text up to this size is rendered and encoded in about a millisecond, as small JSON is read and checked: that is done
/// where it is asked for.
pub const QUICK_BYTES: usize = 16 << 10;
/// Tenants whose places are remembered, after which those are forgotten that use none.
const MAX_IDLE_TENANTS: usize = 1_024;

/// The places of one host.
pub struct Compute {
    places: Arc<Semaphore>,
    /// That one tenant has at most, where there are several.
    of_one: usize,
    tenancy: Tenancy,
    tenants: Mutex<HashMap<String, Arc<Semaphore>>>,
}

/// Tells the work that nobody waits, unless it has ended.
struct GivesUp(Cancel);

impl Compute {
    pub(crate) fn new(tenancy: Tenancy) -> Self {
        // Twice as many as there are processors, so that what is short goes on beside what is long.
        Self::with_places(2 * thread::available_parallelism().map_or(1, usize::from), tenancy)
    }

    fn with_places(places: usize, tenancy: Tenancy) -> Self {
        let (of_one, places) = (places - 1, Arc::new(Semaphore::new(places)));
        Compute { places, of_one, tenancy, tenants: Mutex::default() }
    }

    /// Does the work on another thread, when there is a place. Dropping this gives the work up.
    pub async fn run<T: Send + 'static>(
        &self,
        tenant: &str,
        work: impl FnOnce(&Cancel) -> T + Send + 'static,
    ) -> T {
        // First among the tenant's own: what waits behind those is in nobody's way.
        let own = match self.tenancy.has_several() {
            true => {
                Some(self.of_tenant(tenant).acquire_owned().await.expect("the semaphore is never closed"))
            }
            false => None,
        };
        let place = self.places.clone().acquire_owned().await.expect("the semaphore is never closed");
        let gives_up = GivesUp(Cancel::default());
        let (cancel, span) = (gives_up.0.clone(), Span::current());
        let working = task::spawn_blocking(move || {
            let _places = (own, place);
            span.in_scope(|| work(&cancel))
        });
        match working.await {
            Ok(done) => done,
            Err(error) => match error.try_into_panic() {
                Ok(panic) => std::panic::resume_unwind(panic),
                // The host's threads are going; whoever waits goes with them.
                Err(_cancelled) => std::future::pending().await,
            },
        }
    }

    /// Does the work at once if it is quick, and otherwise on another thread.
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

    fn of_tenant(&self, tenant: &str) -> Arc<Semaphore> {
        let mut tenants = self.tenants.lock().unwrap_or_else(PoisonError::into_inner);
        if tenants.len() > MAX_IDLE_TENANTS {
            tenants.retain(|_, own| Arc::strong_count(own) > 1);
        }
        let own = tenants.entry(tenant.to_owned());
        own.or_insert_with(|| Arc::new(Semaphore::new(self.of_one))).clone()
    }
}

/// Does work about so many bytes that must be done before the caller goes on. Others move to another thread if it is long.
pub(crate) fn in_place<T>(bytes: usize, work: impl FnOnce() -> T) -> T {
    let is_long = bytes > QUICK_BYTES;
    let can_move =
        || Handle::try_current().is_ok_and(|handle| handle.runtime_flavor() == RuntimeFlavor::MultiThread);
    if is_long && can_move() { task::block_in_place(work) } else { work() }
}

impl Drop for GivesUp {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;

    fn two_places() -> Compute {
        let tenancy = Tenancy::default();
        tenancy.set_several(true);
        Compute::with_places(2, tenancy)
    }

    /// Work that goes on until the sender says something or is dropped.
    fn held() -> (mpsc::Sender<()>, impl FnOnce(&Cancel) + Send + 'static) {
        let (release, wait) = mpsc::channel::<()>();
        (release, move |_: &Cancel| _ = wait.recv())
    }

    #[tokio::test]
    async fn one_tenant_never_has_the_last_place() {
        let compute = Arc::new(two_places());
        let (release, first) = held();
        let busy = tokio::spawn({
            let compute = compute.clone();
            async move { compute.run("a", first).await }
        });
        while compute.places.available_permits() == 2 {
            tokio::task::yield_now().await;
        }
        let behind = tokio::spawn({
            let compute = compute.clone();
            async move { compute.run("a", |_| 2).await }
        });
        assert_eq!(compute.run("b", |_| 3).await, 3, "another tenant's work begins at once");
        assert!(!behind.is_finished());
        release.send(()).expect("it waits");
        busy.await.expect("it ended");
        assert_eq!(behind.await.expect("it ended"), 2);
    }

    #[tokio::test]
    async fn work_that_nobody_waits_for_is_told_and_keeps_its_place_until_it_stops() {
        let compute = Arc::new(two_places());
        let (told, hears) = mpsc::channel();
        let (release, wait) = mpsc::channel::<()>();
        let working = tokio::spawn({
            let compute = compute.clone();
            async move {
                let work = move |cancel: &Cancel| {
                    while !cancel.is_cancelled() {
                        std::thread::yield_now();
                    }
                    told.send(()).expect("the test waits");
                    let _ = wait.recv();
                };
                compute.run("a", work).await;
            }
        });
        while compute.places.available_permits() == 2 {
            tokio::task::yield_now().await;
        }
        working.abort();
        assert!(working.await.expect_err("aborted").is_cancelled());
        tokio::task::spawn_blocking(move || hears.recv()).await.expect("no panic").expect("it was told");
        assert_eq!(compute.places.available_permits(), 1);
        drop(release);
        assert_eq!(compute.run("a", |_| 1).await, 1, "the place is free again");
    }
}
