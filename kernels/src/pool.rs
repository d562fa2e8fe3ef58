//! Worker threads that share the tasks of one operation.
//!
//! Invariant: `run` returns after every task ran exactly once; workers spin for a moment after work and then park, so
//! that an idle pool takes no CPU. A task that panics makes `run` panic on the caller, after all tasks are done.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::KernelError;
use crate::affinity::pin_this_thread;

/// How long a worker looks for more work before it parks.
const SPIN: Duration = Duration::from_micros(100);
/// The most threads of a pool.
pub const MAX_THREADS: usize = 256;

/// A pool that belongs to one executor. The calling thread is one of its threads.
pub struct WorkerPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    wake: Vec<Thread>,
    /// One operation at a time.
    turn: Mutex<()>,
    barriers: AtomicU64,
}

/// The tasks of the operation in progress, erased to a pointer that is valid until `run` returns.
#[derive(Clone, Copy)]
struct Job {
    call: *const (dyn Fn(usize) + Sync),
    count: usize,
}

struct Shared {
    /// The operation's number, whether it takes workers, and how many are in it: see [`Gate`].
    gate: AtomicU64,
    job: std::cell::UnsafeCell<Option<Job>>,
    next: AtomicUsize,
    parked: Vec<AtomicBool>,
    stop: AtomicBool,
    failure: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

/// A worker enters an operation only while its gate is open, so that the caller need not wait for one that the
/// operating system has not scheduled: when the tasks are gone it closes the gate and waits for those inside.
struct Gate;

impl Gate {
    const INSIDE: u64 = 0x7fff;
    const OPEN: u64 = 0x8000;
    const EPOCH: u64 = 0x1_0000;
}

// SAFETY: `job` is written only while the gate is closed with nobody inside, and published by opening it.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only followed while `run` holds the closure alive.
unsafe impl Send for Shared {}

impl WorkerPool {
    /// Starts `threads - 1` workers, which the system places.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Self::start(threads, &[])
    }

    /// Starts workers that stay on a CPU each: those of [`crate::affinity::cpus`] after the `first`-th, which is left to
    /// the thread that calls `run`. That one is not the pool's to pin: threads that it starts would stay there too.
    pub fn pinned(threads: usize, first: usize) -> Result<Self, KernelError> {
        let cpus = crate::affinity::cpus();
        if threads > cpus.len() {
            let reason = format!("{threads} threads need a CPU each, and there are {}", cpus.len());
            return Err(KernelError::Pinning { cpu: cpus.len(), reason });
        }
        let own: Vec<usize> = cpus.into_iter().cycle().skip(first).skip(1).take(threads - 1).collect();
        Self::start(threads, &own)
    }

    fn start(threads: usize, cpus: &[usize]) -> Result<Self, KernelError> {
        let threads = threads.clamp(1, MAX_THREADS);
        let shared = Arc::new(Shared {
            gate: AtomicU64::new(0),
            job: std::cell::UnsafeCell::new(None),
            next: AtomicUsize::new(0),
            parked: (1..threads).map(|_| AtomicBool::new(false)).collect(),
            stop: AtomicBool::new(false),
            failure: Mutex::new(None),
        });
        let (pinned, pins) = std::sync::mpsc::channel();
        let mut pool = WorkerPool {
            shared: shared.clone(),
            workers: Vec::new(),
            wake: Vec::new(),
            turn: Mutex::new(()),
            barriers: AtomicU64::new(0),
        };
        for index in 0..threads - 1 {
            let shared = shared.clone();
            let (cpu, pinned) = (cpus.get(index).copied(), pinned.clone());
            let work = move || {
                // Whoever started the pool waits for every answer.
                let _ = pinned.send(cpu.map_or(Ok(()), pin_this_thread));
                shared.work(index);
            };
            let worker = std::thread::Builder::new()
                .name(format!("skep-kernel-{}", index + 1))
                .spawn(work)
                .map_err(|error| KernelError::Thread { reason: error.to_string() })?;
            pool.wake.push(worker.thread().clone());
            pool.workers.push(worker);
        }
        pins.iter().take(pool.workers.len()).collect::<Result<(), _>>()?;
        Ok(pool)
    }

    /// Threads that share the work, the caller's included.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Operations so far that the threads shared, each of which ends when the last of them is done. A step should need
    /// few: between two the threads wait for each other.
    pub fn barriers(&self) -> u64 {
        self.barriers.load(Ordering::Relaxed)
    }

    /// Calls `task` with every index below `count`, spread over the threads.
    pub fn run(&self, count: usize, task: impl Fn(usize) + Sync) {
        if self.workers.is_empty() || count <= 1 {
            (0..count).for_each(task);
            return;
        }
        let turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.barriers.fetch_add(1, Ordering::Relaxed);
        let shared = &*self.shared;
        let call: &(dyn Fn(usize) + Sync) = &task;
        // SAFETY: only the lifetime is erased; `run` waits for every worker before it returns.
        let call: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(call) };
        // SAFETY: the previous operation closed the gate and saw everybody leave.
        unsafe { *shared.job.get() = Some(Job { call, count }) };
        shared.next.store(0, Ordering::Relaxed);
        shared.gate.fetch_add(Gate::EPOCH + Gate::OPEN, Ordering::SeqCst);
        for (parked, thread) in shared.parked.iter().zip(&self.wake) {
            if parked.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        shared.take_tasks(Job { call, count });
        shared.gate.fetch_and(!Gate::OPEN, Ordering::SeqCst);
        let mut spins = 0u32;
        while shared.gate.load(Ordering::Acquire) & Gate::INSIDE != 0 {
            spins += 1;
            // A worker that lost its core inside a task may need ours.
            if spins.is_multiple_of(2048) { std::thread::yield_now() } else { std::hint::spin_loop() }
        }
        drop(turn);
        let failure = shared.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(failure) = failure {
            resume_unwind(failure);
        }
    }
}

impl Drop for WorkerPool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.wake.iter().for_each(Thread::unpark);
        for worker in self.workers.drain(..) {
            // A worker catches its tasks' panics, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        while let Some(epoch) = self.enter(index, seen) {
            seen = epoch;
            // SAFETY: published before the gate opened, and not written again while this worker is inside.
            if let Some(job) = unsafe { *self.job.get() } {
                self.take_tasks(job);
            }
            self.gate.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits for an open operation other than `seen` and enters it; `None` when the pool stops.
    fn enter(&self, index: usize, seen: u64) -> Option<u64> {
        let start = Instant::now();
        let mut spins = 0u32;
        loop {
            if self.stop.load(Ordering::Relaxed) {
                return None;
            }
            let gate = self.gate.load(Ordering::SeqCst);
            if self.awaits(gate, seen) {
                if self.gate.compare_exchange(gate, gate + 1, Ordering::SeqCst, Ordering::Relaxed).is_ok() {
                    return Some(gate / Gate::EPOCH);
                }
                continue;
            }
            spins += 1;
            if spins.is_multiple_of(256) && start.elapsed() > SPIN {
                self.parked[index].store(true, Ordering::SeqCst);
                let gate = self.gate.load(Ordering::SeqCst);
                if !self.awaits(gate, seen) && !self.stop.load(Ordering::SeqCst) {
                    std::thread::park();
                }
                self.parked[index].store(false, Ordering::SeqCst);
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// Whether an operation that the worker has not been in takes workers.
    fn awaits(&self, gate: u64, seen: u64) -> bool {
        gate & Gate::OPEN != 0 && gate / Gate::EPOCH != seen
    }

    fn take_tasks(&self, job: Job) {
        // SAFETY: `run` keeps the closure alive until everybody left.
        let call = unsafe { &*job.call };
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= job.count {
                return;
            }
            if let Err(failure) = catch_unwind(AssertUnwindSafe(|| call(index))) {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
            }
        }
    }
}

/// Values below which an operation is not worth waking the workers for.
const SMALL: usize = 16 * 1024;

/// Runs one call per row, in few tasks when rows are short and on the caller's thread when there is little to do.
pub(crate) fn by_rows(pool: &WorkerPool, rows: usize, width: usize, call: impl Fn(usize) + Sync) {
    if rows.saturating_mul(width) <= SMALL {
        (0..rows).for_each(call);
        return;
    }
    let step = rows.div_ceil(pool.threads() * 4).max(1);
    pool.run(rows.div_ceil(step), |task| (task * step..rows.min((task + 1) * step)).for_each(&call));
}

/// A slice that tasks write disjoint parts of.
pub(crate) struct SharedSlice<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: whoever takes a part promises that no other task has it.
unsafe impl<T: Send> Sync for SharedSlice<T> {}

impl<T> SharedSlice<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len() }
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// # Safety
    /// No other task holds an overlapping part, and the slice outlives it.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, from: usize, len: usize) -> &mut [T] {
        assert!(
            from.checked_add(len).is_some_and(|end| end <= self.len),
            "a task's part is inside its slice"
        );
        // SAFETY: bounds were checked; the caller promises that parts are disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_in_every_operation() {
        let pool = WorkerPool::new(3).unwrap();
        for count in [0, 1, 2, 7, 100] {
            let runs: Vec<AtomicUsize> = (0..count).map(|_| AtomicUsize::new(0)).collect();
            pool.run(count, |task| {
                runs[task].fetch_add(1, Ordering::Relaxed);
            });
            assert!(runs.iter().all(|runs| runs.load(Ordering::Relaxed) == 1));
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn pinned_workers_run_on_one_cpu_each_and_each_on_its_own() {
        use crate::affinity::{cpus, of_this_thread};
        let all = cpus();
        let pool = WorkerPool::pinned(all.len(), 1).unwrap();
        // Every thread waits for all others inside its task, so that none runs two.
        let all_inside = std::sync::Barrier::new(all.len());
        let seen = Mutex::new(Vec::new());
        pool.run(all.len(), |_| {
            all_inside.wait();
            seen.lock().unwrap().push((std::thread::current().id(), of_this_thread()));
        });
        let seen = seen.into_inner().unwrap();
        let caller = std::thread::current().id();
        let mut workers: Vec<Vec<usize>> =
            seen.into_iter().filter(|(thread, _)| *thread != caller).map(|(_, cpus)| cpus).collect();
        workers.sort();
        let mut expected: Vec<Vec<usize>> =
            all.iter().cycle().skip(2).take(all.len() - 1).map(|cpu| vec![*cpu]).collect();
        expected.sort();
        assert_eq!(workers, expected);
        assert_eq!(cpus(), all, "the caller stays free");
        assert!(WorkerPool::pinned(all.len() + 1, 0).is_err(), "more threads than CPUs");
    }

    #[test]
    fn a_panicking_task_reaches_the_caller_and_leaves_the_pool_usable() {
        let pool = WorkerPool::new(2).unwrap();
        let failed = catch_unwind(AssertUnwindSafe(|| pool.run(4, |task| assert_ne!(task, 2, "task two"))));
        assert!(failed.is_err());
        let sum = AtomicUsize::new(0);
        pool.run(5, |task| {
            sum.fetch_add(task, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 10);
    }
}
