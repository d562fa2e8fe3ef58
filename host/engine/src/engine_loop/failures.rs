//! The work of a loop whose executor fails.
//!
//! Invariant: a failure of a step ends the requests in it. A fault, after which the executor computes nothing more, ends no
//! request: the executor is replaced, and computes again what sequences had. Only if that takes long do requests end, with an
//! error that says when to try again.

use std::panic::{AssertUnwindSafe, catch_unwind};

use skep_model::{Batch, BatchSequence, LogitsWanted, ModelError, WindowChange};

use super::EngineLoop;
use crate::EngineError;
use crate::lost_executor::LostExecutor;
use crate::recovery::Progress;
use crate::scheduler::PlannedSequence;

/// Time after which a request may be tried again that has waited for another executor without success.
const RETRY_MS: u32 = 5000;

impl EngineLoop {
    /// Computes one token into a page that no sequence uses. Without logits, the executor returns only once it
    /// is done.
    pub(super) fn probe(&mut self) {
        // A probe must not add changes while the executor takes none.
        if let Err(error) = self.change_windows() {
            return self.record_failure(&error);
        }
        let Some(page) = self.scheduler.unused_page() else { return };
        let sequence =
            BatchSequence { tokens: vec![0], start: 0, pages: vec![page], logits: LogitsWanted::None };
        let batch = Batch { sequences: vec![sequence] };
        let computed = self.change_windows().and_then(|()| guarded(|| self.executor.forward(&batch)));
        // The page is free, so it must not keep anything.
        let released = guarded(|| self.executor.change_windows(&[WindowChange::Release(page)]));
        match computed.and(released) {
            Ok(()) => self.health.record_step(),
            Err(error) => self.record_failure(&error),
        }
    }

    /// Ends the sequences of a step whose forward pass failed.
    pub(super) fn fail(&mut self, plan: &[PlannedSequence], error: &EngineError) {
        if let Some(fault) = self.fault_after(error) {
            return self.lose_executor(&fault, plan);
        }
        tracing::error!(%error, sequences = plan.len(), "a step failed");
        let text = error.to_string();
        self.health.record_failed_step(&text);
        self.scheduler.end_ahead();
        plan.iter()
            .for_each(|planned| self.scheduler.end(planned.id, Err(EngineError::Failed(text.clone()))));
    }

    /// Records a failure that belongs to no request.
    fn record_failure(&mut self, error: &EngineError) {
        match self.fault_after(error) {
            Some(fault) => self.lose_executor(&fault, &[]),
            None => self.health.record_failed_step(&error.to_string()),
        }
    }

    /// Looks whether an executor that has nothing to compute has failed, for example because another model has spoiled the
    /// context of its device.
    pub(super) fn look_for_fault(&mut self) {
        if let Some(fault) = self.executor.fault() {
            self.lose_executor(&fault.to_string(), &[]);
        }
    }

    /// Returns the fault that an error of the executor reports or follows from.
    pub(super) fn fault_after(&self, error: &EngineError) -> Option<String> {
        match error {
            EngineError::Model(error) if error.is_fault() => Some(error.to_string()),
            EngineError::Model(ModelError::Kernel(_) | ModelError::Rank { .. }) => {
                self.executor.fault().map(|fault| fault.to_string())
            }
            _ => None,
        }
    }

    /// Frees an executor that computes nothing more, and begins to replace it. All sequences give up their pages, and continue
    /// once there is another executor. Those of the step that met this fault and the one before are ended, because they may
    /// be the cause.
    pub(super) fn lose_executor(&mut self, fault: &str, step: &[PlannedSequence]) {
        tracing::error!(model = self.name, fault, "the executor has failed and is started again");
        self.health.record_fault(fault.to_owned());
        self.lookahead.begin(None, &[], &mut self.scheduler);
        let lost = LostExecutor::instead_of(&*self.executor);
        self.executor = Box::new(lost);
        for id in self.recovery.begin(fault, step.iter().map(|planned| planned.id)) {
            self.scheduler.end(id, Err(EngineError::Failed(fault.to_owned())));
        }
        if let Some(disk) = &mut self.disk {
            disk.lose_pages(&mut self.scheduler);
        }
        self.scheduler.lose_pages();
    }

    /// Takes the executor that replaces a failed one, if it has started. Requests that have waited long are ended.
    pub(super) fn recover(&mut self) {
        match self.recovery.advance(self.executor.limits()) {
            Progress::Nothing => {}
            Progress::Replaced(executor) => {
                tracing::info!(model = self.name, "the executor has been started again");
                self.executor = executor;
                self.health.record_replacement();
            }
            Progress::Failed(text) => {
                tracing::error!(model = self.name, "{text}");
                self.health.record_fault(text);
            }
        }
        if let Some(fault) = self.recovery.given_up() {
            let name = &self.name;
            self.scheduler.abort(|| EngineError::restarting(name, fault, RETRY_MS));
        }
    }

    /// Records whether the executor still works. `broken` is the error that broke it.
    pub(super) fn record_health(&self, broken: Option<String>) {
        match broken {
            Some(error) => self.health.record_failed_step(&error),
            None => self.health.record_step(),
        }
    }
}

/// Returns whether the executor failed, rather than a single row.
pub(super) fn is_executor_failure(error: &ModelError) -> bool {
    matches!(error, ModelError::Rank { .. } | ModelError::Kernel(_))
}

/// Calls the executor, and turns a panic in it into an error.
pub(super) fn guarded<T>(call: impl FnOnce() -> Result<T, ModelError>) -> Result<T, EngineError> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(EngineError::from),
        Err(_) => Err(EngineError::Failed("the executor panicked".to_string())),
    }
}
