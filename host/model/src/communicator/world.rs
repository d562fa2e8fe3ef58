//! State that all in-process ranks of a model share: whether a rank has failed, whether any rank makes progress, and
//! a condition variable to wait on.
//!
//! Invariant: the first failure fails all ranks and is permanent. A wait finishes when its condition holds, when a
//! rank has failed, or when no rank has made progress for the duration of the deadline. A step may therefore take any
//! time while some rank computes or passes data on.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::error::ModelError;
use crate::error::RankFault;
use crate::rank_times::nanoseconds;

/// Time that a waiting rank spins before it sleeps.
const SPIN: Duration = Duration::from_micros(100);
/// A wait is measured in slices of its deadline.
const SLICES: u32 = 8;

pub(crate) struct World {
    deadline: Duration,
    failure: OnceLock<(usize, RankFault)>,
    /// Number of calls that ranks have made.
    progress: AtomicU64,
    /// Whether each rank has nothing to do until another rank acts.
    idle: Vec<AtomicBool>,
    /// Time that each rank has waited for others.
    waited_ns: Vec<AtomicU64>,
    sleepers: AtomicUsize,
    gate: Mutex<()>,
    news: Condvar,
}

/// Measures the time without progress.
pub(crate) struct Patience {
    slice: Duration,
    deadline: Duration,
    waited: Duration,
    seen: u64,
}

impl World {
    pub(crate) fn new(ranks: usize, deadline: Duration) -> Self {
        World {
            deadline,
            failure: OnceLock::new(),
            progress: AtomicU64::new(0),
            idle: (0..ranks).map(|_| AtomicBool::new(true)).collect(),
            waited_ns: (0..ranks).map(|_| AtomicU64::new(0)).collect(),
            sleepers: AtomicUsize::new(0),
            gate: Mutex::new(()),
            news: Condvar::new(),
        }
    }

    /// Fails every unfinished wait, and returns the first failure, which may be an earlier one.
    pub(crate) fn fail(&self, rank: usize, fault: RankFault) -> ModelError {
        // The first failure is the cause; later ones follow from it.
        let (rank, fault) = self.failure.get_or_init(|| (rank, fault)).clone();
        self.tell();
        ModelError::Rank { rank, fault }
    }

    /// Returns an error if a rank has failed.
    pub(crate) fn check(&self) -> Result<(), ModelError> {
        match self.failure.get() {
            None => Ok(()),
            Some((rank, fault)) => Err(ModelError::Rank { rank: *rank, fault: fault.clone() }),
        }
    }

    /// Records progress that other ranks may be waiting for.
    pub(crate) fn advance(&self) {
        self.progress.fetch_add(1, Ordering::SeqCst);
        self.tell();
    }

    /// Records whether a rank has nothing to do. An idle rank is not at fault when there is no progress.
    pub(crate) fn set_idle(&self, rank: usize, idle: bool) {
        self.idle[rank].store(idle, Ordering::SeqCst);
    }

    /// Returns the time that a rank has waited for others.
    pub(crate) fn waited(&self, rank: usize) -> Duration {
        Duration::from_nanos(self.waited_ns[rank].load(Ordering::Relaxed))
    }

    pub(crate) fn patience(&self) -> Patience {
        Patience::new(self.deadline, self.progress.load(Ordering::SeqCst))
    }

    /// Decides whether to continue waiting after a sleep of `slept`. Once the deadline has passed without progress,
    /// fails the world and blames a rank that is not idle, or `awaited` if there is none.
    pub(crate) fn endure(
        &self,
        patience: &mut Patience,
        slept: Duration,
        awaited: usize,
    ) -> Result<(), ModelError> {
        if patience.endures(self.progress.load(Ordering::SeqCst), slept) {
            return Ok(());
        }
        let busy = self.idle.iter().position(|idle| !idle.load(Ordering::SeqCst));
        Err(self.fail(busy.unwrap_or(awaited), RankFault::TimedOut { deadline: self.deadline }))
    }

    /// Waits as rank `me` until `ready`, a condition that `awaited` brings about.
    pub(super) fn wait(&self, me: usize, awaited: usize, ready: impl Fn() -> bool) -> Result<(), ModelError> {
        // No clock is read where there is nothing to wait for.
        if ready() {
            return Ok(());
        }
        let started = Instant::now();
        let result = self.spin_then_sleep(me, awaited, ready);
        self.waited_ns[me].fetch_add(nanoseconds(started.elapsed()), Ordering::Relaxed);
        result
    }

    fn spin_then_sleep(&self, me: usize, awaited: usize, ready: impl Fn() -> bool) -> Result<(), ModelError> {
        let started = Instant::now();
        let mut spins = 0u32;
        loop {
            // Data that has arrived is valid even if its sender has terminated since.
            if ready() {
                return Ok(());
            }
            self.check()?;
            spins += 1;
            if spins.is_multiple_of(64) {
                if started.elapsed() > SPIN {
                    break;
                }
                // There may be more ranks than cores.
                std::thread::yield_now();
            } else {
                std::hint::spin_loop();
            }
        }
        self.set_idle(me, true);
        let result = self.sleep(awaited, ready);
        self.set_idle(me, false);
        result
    }

    fn sleep(&self, awaited: usize, ready: impl Fn() -> bool) -> Result<(), ModelError> {
        let mut patience = self.patience();
        let mut gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            // The sleeper is counted before it looks. A rank that makes progress after the look then sees a sleeper
            // and takes the gate.
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let before = Instant::now();
            if self.failure.get().is_none() && !ready() {
                let woken = self.news.wait_timeout(gate, patience.slice);
                gate = woken.unwrap_or_else(PoisonError::into_inner).0;
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            if ready() {
                return Ok(());
            }
            self.check()?;
            // A failure takes the gate too.
            drop(gate);
            self.endure(&mut patience, before.elapsed(), awaited)?;
            gate = self.gate.lock().unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn tell(&self) {
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.gate.lock().unwrap_or_else(PoisonError::into_inner));
            self.news.notify_all();
        }
    }
}

impl Patience {
    fn new(deadline: Duration, seen: u64) -> Self {
        Patience { slice: deadline / SLICES, deadline, waited: Duration::ZERO, seen }
    }

    /// Returns the longest time to wait before calling `endure` again.
    pub(crate) fn slice(&self) -> Duration {
        self.slice
    }

    fn endures(&mut self, progress: u64, slept: Duration) -> bool {
        if progress != self.seen {
            self.seen = progress;
            self.waited = Duration::ZERO;
        } else {
            // A process that was stopped for an hour has not waited for an hour.
            self.waited += slept.min(self.slice);
        }
        self.waited < self.deadline
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn patience_ends_only_after_a_deadline_without_progress() {
        let mut patience = Patience::new(Duration::from_secs(8), 0);
        let slice = Duration::from_secs(1);
        // Slow progress may continue forever.
        for progress in 0..100 {
            assert!((0..7).all(|_| patience.endures(progress, slice)), "at {progress}");
        }
        // A pause of the whole process counts as one slice.
        assert!(patience.endures(100, Duration::from_secs(3600)));
        assert!((0..7).all(|_| patience.endures(100, Duration::from_secs(3600))));
        assert!(!patience.endures(100, slice));
    }

    #[test]
    fn counts_the_time_of_waits_by_rank() {
        let world = World::new(2, Duration::from_millis(400));
        world.wait(0, 1, || true).unwrap();
        assert_eq!(world.waited(0), Duration::ZERO);
        let (began, took, calls) = (Instant::now(), Duration::from_millis(5), Cell::new(0));
        let ready = || {
            calls.set(calls.get() + 1);
            // The first look does not belong to the wait.
            if calls.get() > 1 {
                std::thread::sleep(took);
            }
            calls.get() > 1
        };
        world.wait(0, 1, ready).unwrap();
        let waited = world.waited(0);
        assert!(waited >= took && waited <= began.elapsed(), "{waited:?}");
        assert_eq!(world.waited(1), Duration::ZERO);
    }

    #[test]
    fn the_first_failure_is_permanent() {
        let world = World::new(2, Duration::from_secs(1));
        world.check().unwrap();
        world.fail(1, RankFault::Terminated);
        world.fail(0, RankFault::Failed { reason: "because of rank 1".into() });
        let error = world.check().unwrap_err();
        assert!(matches!(error, ModelError::Rank { rank: 1, fault: RankFault::Terminated }), "{error}");
        assert!(world.wait(0, 1, || false).is_err());
    }
}
