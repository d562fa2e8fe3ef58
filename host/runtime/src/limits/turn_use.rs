//! Counts how much of its limits a turn uses.
//!
//! The code that enforces a limit also counts here, so that people can see what a running turn has used. These counts decide
//! nothing. A turn that is rerun after an approval or a restart starts counting again, as its limits do.

use super::Limits;
use crate::deadline::Deadline;
use serde::{Deserialize, Serialize};
use std::{
    borrow::Cow,
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

/// The limits of a turn, in the order of [`Counted`], each with the number of counted units in one unit of its name.
const LIMITS: [(&str, u64); COUNTS] = [
    ("turn_ms", 1_000_000),
    ("cpu_ms", 1_000_000),
    ("memory_mb", 1 << 20),
    ("tokens_per_turn", 1),
    ("host_calls", 1),
    ("host_call_kb", 1 << 10),
    ("fetches", 1),
    ("fetch_kb", 1 << 10),
    ("log_kb", 1 << 10),
    ("events", 1),
];
const COUNTS: usize = 10;

/// One limit of a turn with the amount that the turn has used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnLimit {
    /// The name of the limit under `[limits]` in agent.toml.
    pub name: Cow<'static, str>,
    /// The amount in the unit of the name, rounded up.
    pub used: u64,
    pub limit: u64,
}

/// The amounts that a turn used of each limit, in the units of their names.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UsedAmounts([u64; COUNTS]);

/// The things that a turn uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Counted {
    /// The turn's own time, which does not advance while it waits for people.
    TimeNs,
    CpuNs,
    MemoryBytes,
    Tokens,
    HostCalls,
    HostCallBytes,
    Fetches,
    FetchBytes,
    LogBytes,
    Events,
}

/// Counts what a turn has used so far.
#[derive(Debug, Default)]
pub(crate) struct TurnUse {
    counts: [AtomicU64; COUNTS],
    clock: Mutex<Clock>,
}

#[derive(Debug, Default)]
enum Clock {
    /// The turn waits for other turns.
    #[default]
    NotStarted,
    Runs {
        limits: Limits,
        started: Instant,
        deadline: Deadline,
    },
    /// The turn waits for a person.
    Paused {
        limits: Limits,
    },
    Ended {
        limits: Limits,
    },
}

impl TurnUse {
    /// Starts a run of the turn, with all counts at zero. `deadline` knows how long the run has waited for a person.
    pub(crate) fn start(&self, limits: Limits, started: Instant, deadline: Deadline) {
        let mut clock = self.clock();
        self.counts.iter().for_each(|count| count.store(0, Ordering::Relaxed));
        *clock = Clock::Runs { limits, started, deadline };
    }

    pub(crate) fn add(&self, counted: Counted, amount: u64) {
        self.counts[counted as usize].fetch_add(amount, Ordering::Relaxed);
    }

    /// Replaces a count whose total is known.
    pub(crate) fn set(&self, counted: Counted, amount: u64) {
        self.counts[counted as usize].store(amount, Ordering::Relaxed);
    }

    /// Stops the clock until the next run, because the turn waits for a person.
    pub(crate) fn pause(&self) {
        let mut clock = self.clock();
        self.read_time(&clock);
        if let Clock::Runs { limits, .. } = *clock {
            *clock = Clock::Paused { limits };
        }
    }

    /// Stops the clock for good, and returns what the turn used. Returns `None` if the turn never ran or had ended before.
    pub(crate) fn end(&self) -> Option<UsedAmounts> {
        let mut clock = self.clock();
        self.read_time(&clock);
        match *clock {
            Clock::Runs { limits, .. } | Clock::Paused { limits } => {
                *clock = Clock::Ended { limits };
                Some(self.amounts())
            }
            Clock::NotStarted | Clock::Ended { .. } => None,
        }
    }

    /// Returns the limits with what is used of them; none before the turn has started.
    pub(crate) fn snapshot(&self) -> Vec<TurnLimit> {
        let clock = self.clock();
        self.read_time(&clock);
        match *clock {
            Clock::NotStarted => Vec::new(),
            Clock::Runs { limits, .. } | Clock::Paused { limits } | Clock::Ended { limits } => {
                self.amounts().within(&limits)
            }
        }
    }

    fn read_time(&self, clock: &Clock) {
        if let Clock::Runs { started, deadline, .. } = clock {
            let time = started.elapsed().saturating_sub(deadline.paused());
            self.set(Counted::TimeNs, nanoseconds(time));
        }
    }

    fn amounts(&self) -> UsedAmounts {
        UsedAmounts(std::array::from_fn(|index| {
            self.counts[index].load(Ordering::Relaxed).div_ceil(LIMITS[index].1)
        }))
    }

    fn clock(&self) -> MutexGuard<'_, Clock> {
        self.clock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UsedAmounts {
    /// Returns the amounts with the names of their limits.
    pub(crate) fn named(self) -> impl Iterator<Item = (&'static str, u64)> {
        LIMITS.into_iter().zip(self.0).map(|((name, _), used)| (name, used))
    }

    /// Returns the larger of both amounts for each limit.
    pub(crate) fn max(self, other: UsedAmounts) -> UsedAmounts {
        UsedAmounts(std::array::from_fn(|index| self.0[index].max(other.0[index])))
    }

    fn within(self, limits: &Limits) -> Vec<TurnLimit> {
        let limit_of =
            |wanted| limits.named().find(|(name, _)| *name == wanted).map_or(0, |(_, limit)| limit);
        self.named()
            .map(|(name, used)| TurnLimit { name: name.into(), used, limit: limit_of(name).into() })
            .collect()
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: Duration = Duration::from_secs(3_600);

    fn used(shown: &[TurnLimit], wanted: &str) -> (u64, u64) {
        let limit = shown.iter().find(|limit| limit.name == wanted).expect(wanted);
        (limit.used, limit.limit)
    }

    #[test]
    fn every_counted_limit_is_a_limit_of_agents() {
        let names: Vec<&str> = Limits::default().named().map(|(name, _)| name).collect();
        for (index, (name, _)) in LIMITS.into_iter().enumerate() {
            assert!(names.contains(&name), "{name}");
            assert!(index <= Counted::Events as usize);
        }
    }

    #[test]
    fn amounts_are_rounded_up_to_the_unit_of_their_limit() {
        let counts = TurnUse::default();
        assert!(counts.snapshot().is_empty(), "the turn has not started");
        let limits = Limits { host_call_kb: 7, ..Limits::default() };
        counts.start(limits, Instant::now(), Deadline::new(Instant::now() + LONG));
        counts.add(Counted::HostCallBytes, 1_024);
        counts.add(Counted::HostCallBytes, 1);
        counts.set(Counted::MemoryBytes, 3 << 20);
        let shown = counts.snapshot();
        assert_eq!(used(&shown, "host_call_kb"), (2, 7));
        assert_eq!(used(&shown, "memory_mb").0, 3);
        assert_eq!(used(&shown, "fetches").0, 0);
        let stored = serde_json::to_vec(&shown).expect("it is JSON");
        assert_eq!(serde_json::from_slice::<Vec<TurnLimit>>(&stored).expect("it was written"), shown);
    }

    #[test]
    fn time_in_which_a_person_is_asked_does_not_count_and_a_new_run_counts_from_zero() {
        let counts = TurnUse::default();
        let deadline = Deadline::new(Instant::now() + LONG);
        counts.start(Limits::default(), Instant::now() - Duration::from_secs(5), deadline.clone());
        let stop = deadline.stop();
        counts.add(Counted::Events, 2);
        assert!((5_000..65_000).contains(&used(&counts.snapshot(), "turn_ms").0));
        counts.pause();
        drop(stop);
        let paused = counts.snapshot();
        assert_eq!(counts.snapshot(), paused, "the clock stands still");
        counts.start(Limits::default(), Instant::now(), Deadline::new(Instant::now() + LONG));
        assert_eq!(used(&counts.snapshot(), "events").0, 0);
        let ended = counts.end().expect("it ends for the first time");
        assert_eq!(counts.end(), None);
        assert_eq!(counts.snapshot(), ended.within(&Limits::default()));
    }
}
