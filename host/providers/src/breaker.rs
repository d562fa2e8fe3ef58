//! A circuit breaker: an upstream that fails several times in a row gets no requests for a while, and then a single
//! one as a trial.
//!
//! ```text
//! Closed --(failures in a row)--> Open --(cool-down)--> HalfOpen --(the trial begins to answer)--> Closed
//!                                   ^------(the trial fails: twice the cool-down)------'
//! ```

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rand::RngExt as _;
use tokio::time::Instant;

use crate::{metric, options::BreakerOptions};

pub(crate) struct Breaker {
    upstream: String,
    options: BreakerOptions,
    state: Mutex<State>,
}

#[derive(Debug, Clone)]
enum State {
    Closed {
        failures: u32,
    },
    Open {
        until: Instant,
        cool_down: Duration,
        reason: String,
    },
    /// One request is under way as a trial.
    HalfOpen {
        cool_down: Duration,
        reason: String,
    },
}

/// The permission to send one request. Dropping it undecided counts neither way.
pub(crate) struct Admission {
    breaker: Arc<Breaker>,
    is_trial: bool,
    decided: bool,
}

/// A refusal to send a request.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Broken {
    pub retry_in: Duration,
    pub reason: String,
}

impl Breaker {
    pub(crate) fn new(upstream: &str, options: BreakerOptions) -> Arc<Self> {
        let breaker = Breaker {
            upstream: upstream.to_owned(),
            options,
            state: Mutex::new(State::Closed { failures: 0 }),
        };
        breaker.show(&State::Closed { failures: 0 });
        Arc::new(breaker)
    }

    pub(crate) fn admit(self: &Arc<Self>, now: Instant) -> Result<Admission, Broken> {
        let mut state = self.state();
        let is_trial = match state.clone() {
            State::Closed { .. } => false,
            State::Open { until, cool_down, reason } if until <= now => {
                self.enter(&mut state, State::HalfOpen { cool_down, reason });
                true
            }
            State::Open { until, reason, .. } => return Err(Broken { retry_in: until - now, reason }),
            State::HalfOpen { reason, .. } => {
                return Err(Broken { retry_in: self.options.cool_down, reason });
            }
        };
        Ok(Admission { breaker: self.clone(), is_trial, decided: false })
    }

    /// Returns the reason that nothing is sent at the moment. A trial that is due counts as usable.
    pub(crate) fn problem(&self, now: Instant) -> Option<String> {
        match &*self.state() {
            State::Closed { .. } => None,
            State::Open { until, .. } if *until <= now => None,
            State::Open { until, reason, .. } => {
                let wait = (*until - now).as_secs_f64();
                Some(format!("its circuit breaker is open for another {wait:.1} s: {reason}"))
            }
            State::HalfOpen { reason, .. } => {
                Some(format!("its circuit breaker waits for the result of a trial: {reason}"))
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn enter(&self, state: &mut State, next: State) {
        self.show(&next);
        *state = next;
    }

    fn show(&self, state: &State) {
        let level = match state {
            State::Closed { .. } => 0.0,
            State::HalfOpen { .. } => 1.0,
            State::Open { .. } => 2.0,
        };
        metrics::gauge!(metric::BREAKER, "upstream" => self.upstream.clone()).set(level);
    }

    fn open(&self, state: &mut State, now: Instant, cool_down: Duration, reason: &str) {
        let cool_down = cool_down.min(self.options.max_cool_down);
        let until = now + cool_down.mul_f64(rand::rng().random_range(0.8..1.2));
        tracing::warn!(upstream = self.upstream, "the circuit breaker opens for {cool_down:?}: {reason}");
        self.enter(state, State::Open { until, cool_down, reason: reason.to_owned() });
    }
}

impl Admission {
    /// Records that the upstream has begun to answer, which ends a trial.
    pub(crate) fn begun(&mut self) {
        if self.is_trial && !self.decided {
            self.decided = true;
            let mut state = self.breaker.state();
            tracing::info!(upstream = self.breaker.upstream, "the circuit breaker closes");
            self.breaker.enter(&mut state, State::Closed { failures: 0 });
        }
    }

    /// Records a whole answer, or a response that shows that the upstream works.
    pub(crate) fn succeeded(mut self) {
        self.begun();
        self.decided = true;
        if let State::Closed { failures } = &mut *self.breaker.state() {
            *failures = 0;
        }
    }

    pub(crate) fn failed(mut self, now: Instant, reason: &str) {
        let trial = self.is_trial && !self.decided;
        self.decided = true;
        let breaker = &self.breaker;
        let mut state = breaker.state();
        match state.clone() {
            State::HalfOpen { cool_down, .. } if trial => {
                breaker.open(&mut state, now, cool_down.saturating_mul(2), reason);
            }
            State::Closed { failures } if failures + 1 >= breaker.options.failures => {
                breaker.open(&mut state, now, breaker.options.cool_down, reason);
            }
            State::Closed { failures } => *state = State::Closed { failures: failures + 1 },
            State::Open { .. } | State::HalfOpen { .. } => {}
        }
    }
}

impl Drop for Admission {
    fn drop(&mut self) {
        if self.is_trial && !self.decided {
            // Nobody waits for the trial anymore, so the next request is one.
            let mut state = self.breaker.state();
            if let State::HalfOpen { cool_down, reason } = state.clone() {
                let until = Instant::now();
                self.breaker.enter(&mut state, State::Open { until, cool_down, reason });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn breaker() -> Arc<Breaker> {
        Breaker::new("a", BreakerOptions { failures: 2, cool_down: SECOND, max_cool_down: 3 * SECOND })
    }

    fn opened(now: Instant) -> Arc<Breaker> {
        let breaker = breaker();
        for _ in 0..2 {
            breaker.admit(now).expect("closed").failed(now, "it burns");
        }
        breaker
    }

    #[test]
    fn failures_in_a_row_open_it_and_a_success_between_them_does_not() {
        let (now, breaker) = (Instant::now(), breaker());
        for _ in 0..3 {
            breaker.admit(now).expect("closed").failed(now, "x");
            breaker.admit(now).expect("closed").succeeded();
        }
        assert_eq!(breaker.problem(now), None);
        let breaker = opened(now);
        let broken = breaker.admit(now).err().expect("open");
        assert!(broken.retry_in <= SECOND.mul_f64(1.2) && broken.reason == "it burns", "{broken:?}");
        assert!(breaker.problem(now).expect("open").ends_with("s: it burns"));
    }

    #[test]
    fn one_trial_decides_and_a_failed_one_doubles_the_cool_down() {
        let now = Instant::now();
        let breaker = opened(now);
        let later = now + 2 * SECOND;
        assert_eq!(breaker.problem(later), None);
        let trial = breaker.admit(later).expect("a trial");
        assert!(breaker.admit(later).is_err(), "one trial at a time");
        trial.failed(later, "still");
        assert!(breaker.admit(later + SECOND).is_err(), "the cool-down is twice as long");
        let latest = later + 3 * SECOND;
        let mut trial = breaker.admit(latest).expect("another trial");
        trial.begun();
        breaker.admit(latest).expect("closed");
        trial.failed(latest, "cut off");
        breaker.admit(latest).expect("one failure does not open it");
    }

    #[test]
    fn an_abandoned_trial_lets_the_next_request_try() {
        let now = Instant::now();
        let breaker = opened(now);
        drop(breaker.admit(now + 2 * SECOND).expect("a trial"));
        breaker.admit(Instant::now() + 2 * SECOND).expect("the next trial").succeeded();
        assert_eq!(breaker.problem(now), None);
    }
}
