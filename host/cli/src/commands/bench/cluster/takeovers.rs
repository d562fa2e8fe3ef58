//! How long a session has no answer after the host that owned it was killed or stopped: from that moment until the next
//! message of the session is acknowledged, by another host.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::percentile;

/// The reason why a host does not answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    Killed,
    /// It was stopped with SIGSTOP, so that its connections stay open.
    Stopped,
}

/// Owners of sessions, as clients see them.
#[derive(Default)]
pub struct Takeovers(Mutex<State>);

#[derive(Default)]
struct State {
    /// The host that acknowledged the last message of a session.
    owners: HashMap<String, String>,
    orphans: HashMap<String, Orphan>,
    times: Vec<(Cause, Duration)>,
}

struct Orphan {
    owner: String,
    since: Instant,
    cause: Cause,
}

/// Times in milliseconds.
#[derive(Debug, Serialize)]
pub struct Times {
    pub count: usize,
    pub p50: f64,
    pub p99: f64,
    pub longest: f64,
}

impl Times {
    /// Returns what there is to say about times in milliseconds.
    pub fn of(mut ms: Vec<f64>) -> Self {
        ms.sort_by(f64::total_cmp);
        let at = |share| percentile(&ms, share);
        Self { count: ms.len(), p50: at(0.5), p99: at(0.99), longest: at(1.0) }
    }
}

impl Takeovers {
    /// Records that a host is gone since this moment.
    pub fn lost(&self, host: &str, since: Instant, cause: Cause) {
        let mut state = self.state();
        let State { owners, orphans, .. } = &mut *state;
        for (session, owner) in owners.iter().filter(|(_, owner)| *owner == host) {
            let orphan = || Orphan { owner: owner.clone(), since, cause };
            orphans.entry(session.clone()).or_insert_with(orphan);
        }
    }

    /// Records that a host has acknowledged a message of a session.
    pub fn acknowledged(&self, session: &str, host: &str) {
        let mut state = self.state();
        // An answer of the host itself was under way when it went.
        if let Some(orphan) = state.orphans.get(session).filter(|orphan| orphan.owner != host) {
            let time = (orphan.cause, orphan.since.elapsed());
            state.times.push(time);
            state.orphans.remove(session);
        }
        state.owners.insert(session.to_owned(), host.to_owned());
    }

    /// Forgets a session to which no more messages are sent.
    pub fn left(&self, session: &str) {
        let mut state = self.state();
        state.owners.remove(session);
        state.orphans.remove(session);
    }

    /// Returns the times of the take-overs with this cause.
    pub fn times(&self, cause: Cause) -> Times {
        let state = self.state();
        let of_cause = state.times.iter().filter(|(of, _)| *of == cause);
        Times::of(of_cause.map(|(_, time)| time.as_secs_f64() * 1e3).collect())
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_summed_up_whatever_their_order() {
        let times = Times::of(vec![30.0, 10.0, 40.0, 20.0]);
        assert_eq!((times.count, times.p50, times.p99, times.longest), (4, 20.0, 40.0, 40.0));
    }

    #[test]
    fn a_take_over_lasts_until_another_host_acknowledges_a_message_of_the_session() {
        let takeovers = Takeovers::default();
        for (session, host) in [("one", "a"), ("two", "b"), ("three", "a"), ("four", "a")] {
            takeovers.acknowledged(session, host);
        }
        let since = Instant::now().checked_sub(Duration::from_secs(5)).expect("a moment before now");
        takeovers.lost("a", since, Cause::Killed);
        takeovers.acknowledged("two", "b");
        takeovers.acknowledged("one", "a");
        assert_eq!(takeovers.times(Cause::Killed).count, 0, "the answer was under way");
        takeovers.acknowledged("one", "b");
        takeovers.acknowledged("one", "b");
        takeovers.left("three");
        takeovers.acknowledged("three", "b");
        let times = takeovers.times(Cause::Killed);
        assert_eq!((times.count, takeovers.times(Cause::Stopped).count), (1, 0));
        assert!((5_000.0..60_000.0).contains(&times.p50) && times.p50 == times.p99, "{times:?}");
        // The session is without an owner since the first of two losses.
        takeovers.lost("a", Instant::now(), Cause::Stopped);
        takeovers.acknowledged("four", "b");
        assert_eq!(takeovers.times(Cause::Killed).count, 2);
    }
}
