//! The part of one host in a cluster: what it remembers besides its connections.

use crate::{
    postgres::{LEASE, SILENCE},
    sql::Pool,
};
use sqlx::PgPool;
use std::{
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

/// Time between two meetings after which this host may itself have been what was silent, instead of hosts that have only lost their
/// connections.
const GAP: Duration = Duration::from_secs(1);
/// The same time for hosts that were silent for a whole lease. The machine of this host may be so busy that its meetings are seconds
/// apart, and those hosts have to be replaced then, too.
const LONG_GAP: Duration = Duration::from_secs(5);
const _: () = assert!(GAP.as_millis() < SILENCE.as_millis(), "a host that was away does not judge others");
const _: () = assert!(
    LONG_GAP.as_millis() * 2 <= LEASE.as_millis(),
    "the others were silent while this host was there"
);

/// The way in which the losses of a turn are counted (see [`crate::Store::count_losses`]).
#[derive(Debug)]
pub(crate) struct LossRule {
    pub(crate) called: String,
    pub(crate) aside: Vec<String>,
}

#[derive(Debug)]
pub(crate) struct Membership {
    /// A connection for notifications.
    pub(crate) listening: PgPool,
    /// A connection on which the hosts and the versions of notices are read, so that neither waits for long reads.
    pub(crate) meeting: Pool,
    /// Time at which the last meeting ended.
    met: Mutex<Option<Instant>>,
    /// The rule that the host gave last.
    losses: Mutex<Option<Arc<LossRule>>>,
}

impl Membership {
    pub(crate) fn new(listening: PgPool, meeting: PgPool) -> Self {
        let meeting = Pool::Postgres(meeting);
        Membership { listening, meeting, met: Mutex::default(), losses: Mutex::default() }
    }

    /// Returns whether this host has been watching the others until now. One that hung, or whose database was away, finds all
    /// others silent, which were as well as itself. `begun` is the time at which this meeting began to look, and `is_lease_over` says
    /// that the other host was silent for a whole lease.
    pub(crate) fn has_watched(&self, begun: Instant, is_lease_over: bool) -> bool {
        let gap = if is_lease_over { LONG_GAP } else { GAP };
        let met = *self.met.lock().unwrap_or_else(PoisonError::into_inner);
        met.is_some_and(|met| begun.duration_since(met) < gap) && begun.elapsed() < gap
    }

    /// Records that a meeting has ended.
    pub(crate) fn has_met(&self) {
        *self.met.lock().unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
    }

    /// Remembers how losses are counted, for sessions that are taken from hosts that are gone.
    pub(crate) fn count_losses_by(&self, called: &str, aside: &[&str]) -> Arc<LossRule> {
        let aside = aside.iter().map(|pattern| (*pattern).to_owned()).collect();
        let rule = Arc::new(LossRule { called: called.to_owned(), aside });
        *self.losses.lock().unwrap_or_else(PoisonError::into_inner) = Some(rule.clone());
        rule
    }

    pub(crate) fn loss_rule(&self) -> Option<Arc<LossRule>> {
        self.losses.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use sqlx::postgres::PgPoolOptions;

    #[tokio::test]
    async fn a_host_that_was_away_has_not_watched_the_others() {
        let listening = PgPoolOptions::new().connect_lazy("postgres://localhost/none").unwrap();
        let membership = Membership::new(listening.clone(), listening);
        let now = Instant::now();
        for (is_lease_over, gap) in [(false, GAP), (true, LONG_GAP)] {
            *membership.met.lock().unwrap() = None;
            assert!(!membership.has_watched(now, is_lease_over), "it has never met them");
            membership.has_met();
            assert!(membership.has_watched(Instant::now(), is_lease_over));
            assert!(!membership.has_watched(now - gap, is_lease_over), "it has looked for too long");
            *membership.met.lock().unwrap() = Some(now - gap);
            assert!(!membership.has_watched(Instant::now(), is_lease_over), "it has been away for too long");
        }
    }

    #[tokio::test]
    async fn the_last_rule_for_losses_is_remembered() {
        let listening = PgPoolOptions::new().connect_lazy("postgres://localhost/none").unwrap();
        let membership = Membership::new(listening.clone(), listening);
        assert!(membership.loss_rule().is_none());
        membership.count_losses_by("a", &["b"]);
        membership.count_losses_by("c", &["d"]);
        let rule = membership.loss_rule().unwrap();
        assert_eq!((rule.called.as_str(), &rule.aside[..]), ("c", &["d".to_owned()][..]));
    }
}
