//! Executors that a test controls. They compute with the real one.

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
    pub fn guard(&self, executor: CpuExecutor) -> Gated {
        Gated { executor, gate: self.clone() }
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

pub struct Gated {
    executor: CpuExecutor,
    gate: Gate,
}

/// While it is off, every step fails.
#[derive(Clone, Default)]
pub struct Breaker(Arc<AtomicBool>);

impl Breaker {
    pub fn guard(&self, executor: CpuExecutor) -> Breakable {
        Breakable { executor, breaker: self.clone() }
    }

    pub fn set_broken(&self, is_broken: bool) {
        self.0.store(is_broken, Relaxed);
    }
}

pub struct Breakable {
    executor: CpuExecutor,
    breaker: Breaker,
}

impl Executor for Breakable {
    fn limits(&self) -> &ExecutorLimits {
        self.executor.limits()
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        if self.breaker.0.load(Relaxed) {
            return Err(ModelError::Batch { problem: "the machine is broken".to_string() });
        }
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

impl Executor for Gated {
    fn limits(&self) -> &ExecutorLimits {
        self.executor.limits()
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.gate.pass();
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
