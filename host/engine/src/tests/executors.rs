//! Executors that a test controls. All of them compute with the real executor.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use skep_model::{
    Batch, CpuExecutor, DrawnAhead, Executor, Fault, KernelError, LogitRow, ModelError, StepAhead,
};

use super::intercepted::{Intercepted, Interceptor};

/// Bounds the wait at a gate: a test that fails before it opens its gate must not hang.
const LONGEST_WAIT: Duration = Duration::from_secs(60);

/// Holds steps of the executors that it guards until it is opened, so that a test can arrange requests meanwhile.
#[derive(Clone, Default)]
pub struct Gate(Arc<(Mutex<Passage>, Condvar)>);

/// The steps that a gate lets pass.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Passage {
    #[default]
    Closed,
    OneStep,
    Open,
}

impl Gate {
    /// Returns an executor of which each step is held.
    pub fn guard(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let gate = self.clone();
        let before = move |_: &Batch| {
            gate.pass();
            Ok(())
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    /// Returns an executor of which each step is held in which every sequence has a single token. A longer prompt is computed, so
    /// that its request has its first token, and runs on only once the gate is opened.
    pub fn guard_decodes(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let gate = self.clone();
        let before = move |batch: &Batch| {
            if batch.sequences.iter().all(|sequence| sequence.tokens.len() == 1) {
                gate.pass();
            }
            Ok(())
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    pub fn open(&self) {
        self.set(Passage::Open);
    }

    pub fn close(&self) {
        self.set(Passage::Closed);
    }

    /// Lets the step pass that is held, or the next one, and holds the one after it. However often this is called meanwhile, it is
    /// one step.
    pub fn let_one_pass(&self) {
        self.set(Passage::OneStep);
    }

    /// Waits until a step may pass.
    pub fn pass(&self) {
        let (passage, changed) = &*self.0;
        let passage = passage.lock().unwrap();
        let is_closed = |passage: &mut Passage| *passage == Passage::Closed;
        let (mut passage, waited) = changed.wait_timeout_while(passage, LONGEST_WAIT, is_closed).unwrap();
        assert!(!waited.timed_out(), "the gate was not opened in time");
        if *passage == Passage::OneStep {
            *passage = Passage::Closed;
        }
    }

    fn set(&self, passage: Passage) {
        *self.0.0.lock().unwrap() = passage;
        self.0.1.notify_all();
    }
}

/// Records which positions of prompts made by [`Recorder::prompt`] are computed.
#[derive(Clone, Default)]
pub struct Recorder(Arc<Mutex<HashSet<(u32, usize)>>>);

impl Recorder {
    pub fn watch(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let recorder = self.clone();
        let before = move |batch: &Batch| {
            recorder.note(batch);
            Ok(())
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    /// Returns such an executor behind a gate.
    pub fn watch_behind(&self, gate: &Gate, executor: CpuExecutor) -> impl Executor + use<> {
        let (recorder, gate) = (self.clone(), gate.clone());
        let before = move |batch: &Batch| {
            gate.pass();
            recorder.note(batch);
            Ok(())
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    /// Returns a prompt whose token at each position identifies its owner, one of 26.
    pub fn prompt(owner: u32, length: usize) -> Vec<u32> {
        (0..length).map(|position| u32::from(b'a') + (owner * 7 + position as u32) % 26).collect()
    }

    /// Returns how many of the owner's first `length` positions were computed since the last call.
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

/// Computes slowly, and records where the rows of each step start and how many tokens they have.
#[derive(Clone, Default)]
pub struct Slow(Arc<Mutex<Vec<(usize, usize)>>>);

impl Slow {
    pub fn guard(&self, executor: CpuExecutor, token_time: Duration) -> impl Executor + use<> {
        let rows = self.0.clone();
        let before = move |batch: &Batch| {
            let began = batch.sequences.iter().map(|sequence| (sequence.start, sequence.tokens.len()));
            rows.lock().unwrap().extend(began);
            std::thread::sleep(token_time * u32::try_from(batch.token_count()).unwrap());
            Ok(())
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    /// Returns the rows that began since they were taken.
    pub fn rows(&self) -> Vec<(usize, usize)> {
        self.0.lock().unwrap().clone()
    }

    /// Takes these rows.
    pub fn take(&self) -> Vec<(usize, usize)> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

/// Fails every step while it is broken.
#[derive(Clone, Default)]
pub struct Breaker(Arc<AtomicBool>);

impl Breaker {
    pub fn guard(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let breaker = self.clone();
        let before = move |_: &Batch| match breaker.0.load(Relaxed) {
            true => Err(ModelError::Batch { problem: "the machine is broken".to_string() }),
            false => Ok(()),
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    /// Returns an executor that returns from a step before it is done, and reports the step's failure when its
    /// tokens are requested.
    pub fn guard_late(&self, executor: CpuExecutor) -> impl Executor + use<> {
        Intercepted { executor, interceptor: Late(self.clone()) }
    }

    pub fn set_broken(&self, is_broken: bool) {
        self.0.store(is_broken, Relaxed);
    }
}

/// Lets executors fail for good, as executors on a device that is lost do.
#[derive(Clone, Default)]
pub struct DeviceLoss(Arc<AtomicUsize>);

impl DeviceLoss {
    /// Returns an executor that fails for good in the step that [`DeviceLoss::lose_after`] chooses.
    pub fn guard(&self, executor: CpuExecutor) -> impl Executor + use<> {
        let loss = self.clone();
        let mut is_lost = false;
        let before = move |_: &Batch| {
            // The count is 1 more than the number of steps that still succeed, and 0 without a loss.
            let left = loss.0.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
            is_lost |= left == Ok(1);
            match is_lost {
                true => Err(Self::error().into()),
                false => Ok(()),
            }
        };
        Intercepted { executor, interceptor: BeforeStep(before) }
    }

    /// Loses the device of the executor that computes the step after the next `steps` ones.
    pub fn lose_after(&self, steps: usize) {
        self.0.store(steps + 1, Relaxed);
    }

    /// Returns the error of the loss.
    pub fn error() -> KernelError {
        let reason = "CUDA_ERROR_ECC_UNCORRECTABLE".to_string();
        KernelError::DeviceFault { fault: Fault::Context, call: "cuTest", reason }
    }
}

/// Reports the failure of a broken step when its result is needed.
struct Late(Breaker);

impl Interceptor for Late {
    fn forward(&mut self, executor: &mut CpuExecutor, batch: &Batch) -> Result<(), ModelError> {
        executor.forward(batch)?;
        if batch.logit_rows() == 0 { self.before_logits() } else { Ok(()) }
    }

    fn before_logits(&self) -> Result<(), ModelError> {
        match self.0.0.load(Relaxed) {
            true => {
                Err(KernelError::Driver { call: "wait", reason: "the device is gone".to_string() }.into())
            }
            false => Ok(()),
        }
    }
}

/// Starts the next step with the tokens that it has drawn, as an executor on a device does, and counts how often the step
/// was requested. It computes a started step as late as it may: when the next one is requested.
#[derive(Clone, Default)]
pub struct Ahead(Arc<Mutex<AheadCounts>>);

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AheadCounts {
    pub used: usize,
    pub forgotten: usize,
    /// Rows of started steps whose tokens were known.
    pub known: usize,
}

impl Ahead {
    pub fn watch(&self, executor: CpuExecutor) -> impl Executor + use<> {
        self.watch_after(executor, || {})
    }

    /// Returns such an executor that calls a function ahead of each step.
    pub fn watch_after<F>(&self, executor: CpuExecutor, before: F) -> impl Executor + use<F>
    where
        F: FnMut() + Send + 'static,
    {
        let counts = self.clone();
        Intercepted { executor, interceptor: Continues { begun: None, counts, before } }
    }

    pub fn counts(&self) -> AheadCounts {
        *self.0.lock().unwrap()
    }
}

struct Continues<F> {
    begun: Option<Batch>,
    counts: Ahead,
    before: F,
}

impl<F: FnMut() + Send> Interceptor for Continues<F> {
    fn forward(&mut self, executor: &mut CpuExecutor, batch: &Batch) -> Result<(), ModelError> {
        (self.before)();
        if let Some(begun) = self.begun.take() {
            executor.forward(&begun)?;
            let mut counts = self.counts.0.lock().unwrap();
            if begun == *batch {
                counts.used += 1;
                return Ok(());
            }
            counts.forgotten += 1;
        }
        executor.forward(batch)
    }

    fn supports_lookahead(&self) -> bool {
        true
    }

    fn sample_and_begin(
        &mut self,
        executor: &mut CpuExecutor,
        rows: &[LogitRow<'_>],
        next: &StepAhead,
    ) -> Result<DrawnAhead, ModelError> {
        let outputs = executor.sample(rows)?;
        // A device draws no scores.
        let has_begun =
            rows.iter().all(|row| matches!(row, LogitRow::Sample(row) if row.top_logprobs.is_none()));
        if has_begun {
            let (drawn, known) = next.batch.sequences.split_at(next.drawn.len());
            assert!(!drawn.is_empty() && drawn.iter().all(|sequence| sequence.tokens == [0]), "{next:?}");
            assert!(known.iter().all(|sequence| !sequence.tokens.is_empty()), "{next:?}");
            self.counts.0.lock().unwrap().known += known.len();
            let mut next = next.clone();
            next.fill_in(&outputs.iter().map(|output| output.token).collect::<Vec<_>>());
            self.begun = Some(next.batch);
        }
        Ok(DrawnAhead { outputs, has_begun })
    }
}

/// Calls a function ahead of each step, and fails the step if the function fails.
struct BeforeStep<F>(F);

impl<F: FnMut(&Batch) -> Result<(), ModelError> + Send> Interceptor for BeforeStep<F> {
    fn forward(&mut self, executor: &mut CpuExecutor, batch: &Batch) -> Result<(), ModelError> {
        (self.0)(batch)?;
        executor.forward(batch)
    }
}
