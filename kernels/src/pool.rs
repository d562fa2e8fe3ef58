//! Worker threads that share the tasks of one operation.
//!
//! Invariant: `run` returns after every task has run exactly once. Workers spin briefly after work and then park, so that
//! an idle pool takes no CPU time. A task that panics makes `run` panic on the calling thread after all tasks are done.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{JoinHandle, Thread};
use std::time::{Duration, Instant};

use crate::KernelError;
use crate::affinity::pin_this_thread;
use crate::turns::{Turn, TurnGroup};

/// The time that a worker spins for more work before it parks.
const SPIN: Duration = Duration::from_micros(100);
/// Number of values by which the memory of operations grows.
const SCRATCH_STEP: usize = 1 << 18;
/// Maximum number of threads of a pool.
pub const MAX_THREADS: usize = 256;

/// A pool of threads that belongs to one executor. The thread that calls `run` counts as one of them.
pub struct WorkerPool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    wake: Vec<Thread>,
    /// Held during an operation, so that operations run one at a time.
    turn: Mutex<()>,
    barriers: AtomicU64,
    /// Memory of an operation beside its operands, which the next one reuses.
    scratch: Mutex<Vec<f32>>,
    /// The group that shares the CPUs with others. Without one, operations never wait for other pools.
    group: Option<TurnGroup>,
}

/// The tasks of the current operation, erased to a pointer that is valid until `run` returns.
#[derive(Clone, Copy)]
struct Job {
    call: *const (dyn Fn(usize) + Sync),
}

struct Shared {
    /// The number of the operation, whether workers may enter it, and how many are inside: see [`Gate`].
    gate: AtomicU64,
    job: std::cell::UnsafeCell<Option<Job>>,
    /// The tasks that each thread has left, from the calling one on.
    left: Vec<TaskRange>,
    parked: Vec<AtomicBool>,
    stop: AtomicBool,
    failure: Mutex<Option<Box<dyn std::any::Any + Send>>>,
}

/// Consecutive tasks, of which the thread that they were given to takes the first and other threads take the last. Neighboring
/// tasks read neighboring weights, so the weights that a task prefetches past its end are those of the next one.
#[repr(align(128))]
struct TaskRange {
    /// The first task in the upper half, the end in the lower one.
    bounds: AtomicU64,
}

impl TaskRange {
    fn new() -> Self {
        TaskRange { bounds: AtomicU64::new(0) }
    }

    fn set(&self, tasks: std::ops::Range<usize>) {
        self.bounds.store((tasks.start as u64) << 32 | tasks.end as u64, Ordering::Relaxed);
    }

    fn take(&self, from_end: bool) -> Option<usize> {
        let mut bounds = self.bounds.load(Ordering::Relaxed);
        loop {
            let (start, end) = (bounds >> 32, bounds & u64::from(u32::MAX));
            if start >= end {
                return None;
            }
            let (task, rest) = if from_end { (end - 1, bounds - 1) } else { (start, bounds + (1 << 32)) };
            match self.bounds.compare_exchange_weak(bounds, rest, Ordering::Relaxed, Ordering::Relaxed) {
                Ok(_) => return Some(task as usize),
                Err(found) => bounds = found,
            }
        }
    }
}

/// The bit layout of `Shared::gate`.
///
/// A worker enters an operation only while its gate is open, so that the caller need not wait for a worker that the
/// operating system has not scheduled: once all tasks are taken, it closes the gate and waits for the workers inside.
struct Gate;

impl Gate {
    const INSIDE: u64 = 0x7fff;
    const OPEN: u64 = 0x8000;
    const EPOCH: u64 = 0x1_0000;
}

// SAFETY: `job` is written only while the gate is closed and no worker is inside, and published by opening the gate.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is dereferenced only while `run` keeps the closure alive.
unsafe impl Send for Shared {}

impl WorkerPool {
    /// Starts `threads - 1` workers, which the operating system schedules freely.
    pub fn new(threads: usize) -> Result<Self, KernelError> {
        Self::start(threads, &[])
    }

    /// Starts workers that are each pinned to a CPU: the CPUs of [`crate::affinity::cpus`] after the `first`-th, which is
    /// left to the thread that calls `run`. The pool does not pin that thread, because the threads that it starts would
    /// inherit the pinning.
    pub fn pinned(threads: usize, first: usize) -> Result<Self, KernelError> {
        let cpus = crate::affinity::cpus();
        if threads > cpus.len() {
            let reason = format!("{threads} threads need a CPU each, but there are {}", cpus.len());
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
            left: (0..threads).map(|_| TaskRange::new()).collect(),
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
            scratch: Mutex::default(),
            group: None,
        };
        for index in 0..threads - 1 {
            let shared = shared.clone();
            let (cpu, pinned) = (cpus.get(index).copied(), pinned.clone());
            let work = move || {
                // The thread that starts the pool waits for the result of every worker.
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

    /// Makes the pool take turns with the pools of other groups. From then on, `run` is called only by a thread that
    /// holds a turn of [`WorkerPool::take_turn`].
    pub fn share_cpus(&mut self, group: TurnGroup) {
        self.group = Some(group);
    }

    /// Waits until the pool's group may compute. `None` means that the pool shares the CPUs with no group.
    pub fn take_turn(&self) -> Option<Turn> {
        self.group.as_ref().map(TurnGroup::take)
    }

    /// Returns the number of threads that share the work, including the calling thread.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Returns at least `length` values, whatever they are, for one operation. They stay in memory for the next one: new memory
    /// would be filled with zeros, a page at a time, in every operation.
    pub(crate) fn scratch(&self, length: usize) -> MutexGuard<'_, Vec<f32>> {
        let mut scratch = self.scratch.lock().unwrap_or_else(PoisonError::into_inner);
        if scratch.len() < length {
            // The former values are not kept, so they need not be copied.
            *scratch = Vec::new();
            *scratch = vec![0.0; length.next_multiple_of(SCRATCH_STEP)];
        }
        scratch
    }

    /// Returns the size in bytes of the memory that operations with `length` values beside their operands leave behind.
    pub(crate) fn scratch_bytes_of(length: usize) -> usize {
        length.div_ceil(SCRATCH_STEP).saturating_mul(SCRATCH_STEP * size_of::<f32>())
    }

    /// Returns the size in bytes of the memory that the pool keeps for operations.
    pub fn scratch_bytes(&self) -> usize {
        self.scratch.lock().unwrap_or_else(PoisonError::into_inner).capacity() * size_of::<f32>()
    }

    /// Returns the number of operations so far that the threads shared. Each one ends with a barrier where the threads wait
    /// for each other, so a step should need few.
    pub fn barriers(&self) -> u64 {
        self.barriers.load(Ordering::Relaxed)
    }

    /// Calls `task` with every index below `count`, distributed over the threads.
    pub fn run(&self, count: usize, task: impl Fn(usize) + Sync) {
        if let Some(group) = &self.group {
            group.pause();
        }
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
        // SAFETY: the previous operation closed the gate and waited until every worker had left.
        unsafe { *shared.job.get() = Some(Job { call }) };
        assert!(u32::try_from(count).is_ok(), "an operation has less than 2^32 tasks");
        let threads = shared.left.len();
        for (thread, left) in shared.left.iter().enumerate() {
            left.set(count * thread / threads..count * (thread + 1) / threads);
        }
        shared.gate.fetch_add(Gate::EPOCH + Gate::OPEN, Ordering::SeqCst);
        for (parked, thread) in shared.parked.iter().zip(&self.wake) {
            if parked.load(Ordering::SeqCst) {
                thread.unpark();
            }
        }
        shared.take_tasks(Job { call }, 0);
        shared.gate.fetch_and(!Gate::OPEN, Ordering::SeqCst);
        let mut spins = 0u32;
        while shared.gate.load(Ordering::Acquire) & Gate::INSIDE != 0 {
            spins += 1;
            // A worker that was descheduled inside a task may need the core of this thread.
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
            // A worker catches the panics of its tasks, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

impl Shared {
    fn work(&self, index: usize) {
        let mut seen = 0;
        while let Some(epoch) = self.enter(index, seen) {
            seen = epoch;
            // SAFETY: the job was published before the gate opened, and is not written again while this worker is inside.
            if let Some(job) = unsafe { *self.job.get() } {
                self.take_tasks(job, index + 1);
            }
            self.gate.fetch_sub(1, Ordering::AcqRel);
        }
    }

    /// Waits for an open operation other than `seen`, enters it and returns its number; returns `None` when the pool stops.
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

    /// Returns whether the gate is open for an operation that the worker has not entered yet.
    fn awaits(&self, gate: u64, seen: u64) -> bool {
        gate & Gate::OPEN != 0 && gate / Gate::EPOCH != seen
    }

    /// Computes the tasks of a thread, and then those that other threads have left.
    fn take_tasks(&self, job: Job, thread: usize) {
        // SAFETY: `run` keeps the closure alive until every worker has left.
        let call = unsafe { &*job.call };
        let threads = self.left.len();
        let of_others = || (1..threads).find_map(|next| self.left[(thread + next) % threads].take(true));
        while let Some(index) = self.left[thread].take(false).or_else(of_others) {
            if let Err(failure) = catch_unwind(AssertUnwindSafe(|| call(index))) {
                *self.failure.lock().unwrap_or_else(PoisonError::into_inner) = Some(failure);
            }
        }
    }
}

/// Number of values up to which an operation is not worth waking the workers.
const SMALL: usize = 16 * 1024;

/// Runs one call per row. Short rows are grouped into few tasks, and small operations run on the calling thread.
pub(crate) fn by_rows(pool: &WorkerPool, rows: usize, width: usize, call: impl Fn(usize) + Sync) {
    if rows.saturating_mul(width) <= SMALL {
        (0..rows).for_each(call);
        return;
    }
    let step = rows.div_ceil(pool.threads() * 4).max(1);
    pool.run(rows.div_ceil(step), |task| (task * step..rows.min((task + 1) * step)).for_each(&call));
}

/// A slice of which tasks write disjoint parts.
pub(crate) struct SharedSlice<T> {
    start: *mut T,
    len: usize,
}

// SAFETY: callers of `part` guarantee that no other task has an overlapping part.
unsafe impl<T: Send> Sync for SharedSlice<T> {}

impl<T> SharedSlice<T> {
    pub(crate) fn new(slice: &mut [T]) -> Self {
        SharedSlice { start: slice.as_mut_ptr(), len: slice.len() }
    }

    pub(crate) fn as_mut_ptr(&self) -> *mut T {
        self.start
    }

    /// Returns the `len` values from `from`.
    ///
    /// # Safety
    /// No other task holds an overlapping part, and the slice outlives the returned part.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part(&self, from: usize, len: usize) -> &mut [T] {
        assert!(
            from.checked_add(len).is_some_and(|end| end <= self.len),
            "a task's part must be inside its slice"
        );
        // SAFETY: bounds were checked; the caller guarantees that parts are disjoint.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(from), len) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

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

    #[test]
    fn a_thread_takes_its_own_tasks_in_order_and_others_take_the_last() {
        let range = TaskRange::new();
        range.set(3..8);
        let taken =
            [range.take(false), range.take(true), range.take(false), range.take(true), range.take(true)];
        assert_eq!(taken.map(Option::unwrap), [3, 7, 4, 6, 5]);
        assert_eq!((range.take(false), range.take(true)), (None, None));
        // A thread that is held in its first task leaves the rest of its tasks to the other one.
        let pool = WorkerPool::new(2).unwrap();
        let (caller, left) = (std::thread::current().id(), AtomicUsize::new(7));
        pool.run(8, |task| {
            if task == 0 && std::thread::current().id() == caller {
                while left.load(Ordering::SeqCst) > 0 {
                    std::thread::yield_now();
                }
            } else {
                left.fetch_sub(1, Ordering::SeqCst);
            }
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn each_pinned_worker_runs_on_its_own_cpu() {
        use crate::affinity::{cpus, of_this_thread};
        let all = cpus();
        let pool = WorkerPool::pinned(all.len(), 1).unwrap();
        // Every thread waits for all others inside its task, so that no thread runs two tasks.
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
        assert_eq!(cpus(), all, "the calling thread stays unpinned");
        assert!(WorkerPool::pinned(all.len() + 1, 0).is_err(), "more threads than CPUs");
    }

    #[test]
    fn the_memory_of_operations_is_reused_and_grows() {
        let pool = WorkerPool::new(1).unwrap();
        assert_eq!(pool.scratch(0).len(), 0);
        pool.scratch(3).fill(7.0);
        let start = pool.scratch(SCRATCH_STEP).as_ptr();
        assert_eq!(pool.scratch(3)[..3], [7.0; 3]);
        assert_eq!(pool.scratch(SCRATCH_STEP).as_ptr(), start);
        assert_eq!(pool.scratch(SCRATCH_STEP + 1).len(), 2 * SCRATCH_STEP);
        assert_eq!(pool.scratch_bytes(), WorkerPool::scratch_bytes_of(SCRATCH_STEP + 1));
        assert_eq!(WorkerPool::scratch_bytes_of(0), 0);
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
