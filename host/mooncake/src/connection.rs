//! A connection to the store, which is made in the background and pauses after failures.
//!
//! Invariant: nobody waits for a store that is away. Its users see `None` until it is connected and has rested.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use skep_cache::metric;

use crate::objects::{Failure, Objects};

/// The first pause after a failure. Each further one in a row doubles it.
const FIRST_PAUSE: Duration = Duration::from_millis(if cfg!(test) { 50 } else { 1_000 });
const MAX_PAUSE: Duration = Duration::from_secs(30);
/// Number of failures of the master in a row after which the client is replaced.
const MAX_MASTER_FAILURES: u32 = 3;

/// Connects to the store. It may take seconds.
pub(crate) type Connect = Box<dyn Fn() -> Result<Arc<dyn Objects>, Failure> + Send + Sync>;

pub(crate) struct Connection {
    connect: Connect,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    objects: Option<Arc<dyn Objects>>,
    /// Failures in a row, and those among them of the master.
    failures: u32,
    master_failures: u32,
    /// The time until which nothing is tried.
    rests_until: Option<Instant>,
    problem: Option<String>,
}

impl State {
    fn rests(&self, now: Instant) -> bool {
        self.rests_until.is_some_and(|until| now < until)
    }
}

impl Connection {
    /// Creates a connection that is not made yet.
    pub fn new(connect: Connect) -> Self {
        Connection { connect, state: Mutex::default() }
    }

    /// Returns the store, if it can be used now.
    pub fn objects(&self) -> Option<Arc<dyn Objects>> {
        let state = self.state();
        state.objects.clone().filter(|_| !state.rests(Instant::now()))
    }

    /// Returns whether the store can be used now. The caller may be an engine: it never holds the client, whose last owner takes
    /// leave of a master that may not answer.
    pub fn is_usable(&self) -> bool {
        let state = self.state();
        state.objects.is_some() && !state.rests(Instant::now())
    }

    /// Returns why the store cannot be used, if it cannot and that is known.
    pub fn problem(&self) -> Option<String> {
        self.state().problem.clone()
    }

    /// Connects if that is due. Only one thread may call it.
    pub fn connect_if_due(&self) {
        {
            let state = self.state();
            if state.objects.is_some() || state.rests(Instant::now()) {
                return;
            }
        }
        match (self.connect)() {
            Ok(objects) => {
                let mut state = self.state();
                if state.problem.is_some() {
                    tracing::info!("the cluster cache can be used");
                }
                *state = State { objects: Some(objects), ..State::default() };
            }
            Err(failure) => self.failed(&failure),
        }
    }

    /// Records that a call has succeeded.
    pub fn succeeded(&self) {
        let mut state = self.state();
        if state.failures > 0 && state.objects.is_some() {
            (state.failures, state.master_failures, state.rests_until, state.problem) = (0, 0, None, None);
        }
    }

    /// Records that a call has failed: the store rests, and is connected again after several failures of its master.
    pub fn failed(&self, failure: &Failure) {
        let gone = {
            let mut state = self.state();
            let problem = failure.to_string();
            if state.problem.is_none() {
                tracing::warn!("the cluster cache cannot be used, and pages are computed: {problem}");
            }
            state.problem = Some(problem);
            let pause = (FIRST_PAUSE * 2u32.saturating_pow(state.failures)).min(MAX_PAUSE);
            state.failures += 1;
            state.rests_until = Some(Instant::now() + pause);
            if matches!(failure, Failure::Master { .. }) {
                state.master_failures += 1;
            }
            let is_lost = state.master_failures >= MAX_MASTER_FAILURES;
            state.objects.take_if(|_| is_lost)
        };
        metrics::gauge!(metric::CLUSTER_UP).set(0.0);
        // The client says goodbye to a master that may not answer, outside of the lock.
        drop(gone);
    }

    /// Gives up the store. It is left when the last user of what is returned has dropped it, which can take a minute if its
    /// master is away.
    pub fn leave(&self) -> Option<Arc<dyn Objects>> {
        self.state().objects.take()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
