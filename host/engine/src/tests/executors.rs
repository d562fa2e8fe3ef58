//! Executors that a test controls. They compute with the real one.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use skep_model::{Batch, CpuExecutor, Executor, ExecutorLimits, LogitRow, MemoryPlan, ModelError, RowOutput};

/// A test that fails before it opens its gate must not hang.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Holds every step of the executors that it guards until it is opened, so that a test can arrange what waits.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    pub fn guard(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let gate = self.clone();
        let before = move |_: &Batch| {
            gate.pass();
            Ok(())
        };
        Hooked { executor, before }
    }

    pub fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let (is_open, opened) = &*self.0;
        let is_open = is_open.lock().unwrap();
        let waited = opened.wait_timeout_while(is_open, LONGEST_WAIT, |is_open| !*is_open).unwrap();
        assert!(!waited.1.timed_out(), "nobody opened the gate");
    }
}

/// Notes which positions of prompts made by [`Recorder::prompt`] are computed.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<HashSet<(u32, usize)>>>);

impl Recorder {
    pub fn watch(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let recorder = self.clone();
        let before = move |batch: &Batch| {
            recorder.note(batch);
            Ok(())
        };
        Hooked { executor, before }
    }

    /// A prompt whose tokens tell at each position whose they are: one of 26 owners.
    pub fn prompt(owner: u32, length: usize) -> Vec<u32> {
        (0..length).map(|position| u32::from(b'a') + (owner * 7 + position as u32) % 26).collect()
    }

    /// How many positions of the owner's first `length` were computed since the last call.
    pub fn take(&self, owner: u32, length: usize) -> usize {
        let mut computed = self.0.lock().unwrap();
        let before = computed.len();
        computed.retain(|(of, position)| *of != owner || *position >= length);
        before - computed.len()
    }

    fn note(&self, batch: &Batch) {
        let mut computed = self.0.lock().unwrap();
        for sequence in &batch.sequences {
            for (position, token) in (sequence.start..).zip(&sequence.tokens) {
                let owner = (0..26).find(|owner| Self::prompt(*owner, position + 1)[position] == *token);
                computed.extend(owner.map(|owner| (owner, position)));
            }
        }
    }
}

/// While it is off, every step fails.
#[derive(Clone, Default)]
pub struct Breaker(Arc<AtomicBool>);

impl Breaker {
    pub fn guard(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let breaker = self.clone();
        let before = move |_: &Batch| match breaker.0.load(Relaxed) {
            true => Err(ModelError::Batch { problem: "the machine is broken".to_string() }),
            false => Ok(()),
        };
        Hooked { executor, before }
    }

    pub fn set_broken(&self, is_broken: bool) {
        self.0.store(is_broken, Relaxed);
    }
}

/// Calls `before` ahead of each step, and fails the step if that fails.
struct Hooked<F> {
    executor: CpuExecutor,
    before: F,
}

impl<F: FnMut(&Batch) -> Result<(), ModelError> + Send> Executor for Hooked<F> {
    fn limits(&self) -> &ExecutorLimits {
        self.executor.limits()
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        (self.before)(batch)?;
        self.executor.forward(batch)
    }

    fn logits(&self, row: usize) -> Result<&[f32], ModelError> {
        self.executor.logits(row)
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        self.executor.sample(rows)
    }

    fn plan(&self) -> &MemoryPlan {
        self.executor.plan()
    }
}
