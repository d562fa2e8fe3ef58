//! The part of one host in a cluster: what it remembers besides its connections.

use crate::{
    postgres::{LEASE, SILENCE},
    sql::Pool,
};
use sqlx::PgPool;
use std::{
    collections::HashMap,
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

/// Time for which this host has to find the same sign of life of a host whose lease is over: several renewals. The clock of the server may
/// be set forward, after which every lease seems to be over.
const UNCHANGED: Duration = Duration::from_secs(2);

/// The last sign of life of another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SignOfLife {
    pub(crate) number: i64,
    /// The time of the server at which it was given.
    pub(crate) at_ms: i64,
    /// Whether it is older than a lease.
    pub(crate) is_lease_over: bool,
    /// Whether it is older than [`SILENCE`], and the host has lost its connection.
    pub(crate) is_cut_off: bool,
}

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
    /// The time of each other host's last sign of life, as the last meeting has found it, and since when meetings find the same one.
    signs: Mutex<HashMap<i64, (i64, Instant)>>,
    /// The rule that the host gave last.
    losses: Mutex<Option<Arc<LossRule>>>,
}

impl Membership {
    pub(crate) fn new(listening: PgPool, meeting: PgPool) -> Self {
        let meeting = Pool::Postgres(meeting);
        Membership {
            listening,
            meeting,
            met: Mutex::default(),
            signs: Mutex::default(),
            losses: Mutex::default(),
        }
    }

    /// Returns the hosts that count as dead, given the signs of life of all others. `begun` is the time at which this meeting began to
    /// look.
    pub(crate) fn judge(&self, begun: Instant, others: Vec<SignOfLife>) -> Vec<SignOfLife> {
        let mut signs = self.signs.lock().unwrap_or_else(PoisonError::into_inner);
        let found = |sign: &SignOfLife| {
            let known = signs.get(&sign.number).filter(|(at_ms, _)| *at_ms == sign.at_ms);
            (sign.number, known.copied().unwrap_or((sign.at_ms, begun)))
        };
        let found: HashMap<_, _> = others.iter().map(found).collect();
        *signs = found;
        let is_unchanged = |sign: &SignOfLife| {
            let known = signs.get(&sign.number);
            known.is_some_and(|(_, since)| begun.duration_since(*since) >= UNCHANGED)
        };
        let is_dead = |sign: &SignOfLife| {
            sign.is_cut_off && self.has_watched(begun, GAP)
                || sign.is_lease_over && self.has_watched(begun, LONG_GAP) && is_unchanged(sign)
        };
        others.into_iter().filter(is_dead).collect()
    }

    /// Returns whether this host has been watching the others until now. One that hung, or whose database was away, finds all
    /// others silent, which were as well as itself.
    fn has_watched(&self, begun: Instant, gap: Duration) -> bool {
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
        let met = |at: Option<Instant>| *membership.met.lock().unwrap() = at;
        for gap in [GAP, LONG_GAP] {
            met(None);
            assert!(!membership.has_watched(Instant::now(), gap), "it has never met them");
            // A busy machine may stop this process for a while.
            let watched = (0..10).any(|_| {
                membership.has_met();
                membership.has_watched(Instant::now(), gap)
            });
            assert!(watched);
            let now = Instant::now();
            assert!(!membership.has_watched(now - gap, gap), "it has looked for too long");
            met(Some(now - gap));
            assert!(!membership.has_watched(Instant::now(), gap), "it has been away for too long");
        }
    }

    #[tokio::test]
    async fn a_host_whose_lease_is_over_is_dead_once_it_has_given_no_other_sign_for_a_while() {
        let listening = PgPoolOptions::new().connect_lazy("postgres://localhost/none").unwrap();
        let membership = Membership::new(listening.clone(), listening);
        membership.has_met();
        let late = |at_ms| SignOfLife { number: 7, at_ms, is_lease_over: true, is_cut_off: false };
        let judge = |sign| membership.judge(Instant::now(), vec![sign]);
        assert_eq!(judge(late(1)), [], "the clock of the server may have been set forward");
        let age = || {
            for (_, since) in membership.signs.lock().unwrap().values_mut() {
                *since -= UNCHANGED;
            }
        };
        age();
        assert_eq!(judge(late(2)), [], "it lives");
        age();
        assert_eq!(judge(late(2)), [late(2)]);
        let cut_off = SignOfLife { number: 8, at_ms: 1, is_lease_over: false, is_cut_off: true };
        membership.has_met();
        assert_eq!(judge(cut_off), [cut_off]);
        assert_eq!(membership.signs.lock().unwrap().len(), 1, "hosts that are gone are forgotten");
        *membership.met.lock().unwrap() = Some(Instant::now() - GAP);
        assert_eq!(judge(cut_off), [], "this host may have been cut off as well");
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
