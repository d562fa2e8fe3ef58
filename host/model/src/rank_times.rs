//! The time that the ranks of a divided model spend in steps, and how long they wait for each other in them.
//!
//! Invariant: times only grow, and a step never waits for a reader. The time between steps counts for nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The time of one rank since its executor was created.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RankTime {
    pub steps: u64,
    /// Time in steps that the rank did not wait.
    pub computing: Duration,
    /// Time in steps that the rank waited for other ranks.
    pub waiting: Duration,
}

/// The times of the ranks of an executor.
#[derive(Debug)]
pub struct RankTimes {
    /// In the order of the ranks' numbers.
    ranks: Box<[Counters]>,
}

#[derive(Debug, Default)]
struct Counters {
    steps: AtomicU64,
    computing_ns: AtomicU64,
    waiting_ns: AtomicU64,
}

impl RankTimes {
    pub(crate) fn new(ranks: usize) -> Arc<Self> {
        Arc::new(RankTimes { ranks: (0..ranks).map(|_| Counters::default()).collect() })
    }

    /// Returns the time of each rank, in the order of their numbers.
    pub fn of_ranks(&self) -> Vec<RankTime> {
        let read = |counters: &Counters| RankTime {
            steps: counters.steps.load(Ordering::Relaxed),
            computing: Duration::from_nanos(counters.computing_ns.load(Ordering::Relaxed)),
            waiting: Duration::from_nanos(counters.waiting_ns.load(Ordering::Relaxed)),
        };
        self.ranks.iter().map(read).collect()
    }

    /// Adds a step of a rank that took `took`, of which the rank waited for `waited`.
    pub(crate) fn record(&self, rank: usize, took: Duration, waited: Duration) {
        let counters = &self.ranks[rank];
        counters.steps.fetch_add(1, Ordering::Relaxed);
        counters.computing_ns.fetch_add(nanoseconds(took.saturating_sub(waited)), Ordering::Relaxed);
        counters.waiting_ns.fetch_add(nanoseconds(waited), Ordering::Relaxed);
    }
}

/// Returns a time in nanoseconds, which fit into 64 bits for 584 years.
pub(crate) fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn adds_up_the_steps_of_each_rank() {
        let times = RankTimes::new(2);
        let ms = Duration::from_millis;
        times.record(1, ms(5), ms(2));
        times.record(1, ms(3), ms(0));
        let busy = RankTime { steps: 2, computing: ms(6), waiting: ms(2) };
        assert_eq!(times.of_ranks(), [RankTime::default(), busy]);
    }
}
