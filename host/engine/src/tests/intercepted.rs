//! An executor of a test that passes every call on to a real one, except those that the test intercepts.

use skep_model::{
    Batch, CpuExecutor, DrawnAhead, Executor, ExecutorLimits, LogitRow, MemoryPlan, ModelError, PageForm,
    PageId, RowOutput, StepAhead, WindowChange, WindowLimits,
};

/// The calls that a test can intercept. By default, each one is passed on.
pub trait Interceptor: Send {
    /// Computes a step.
    fn forward(&mut self, executor: &mut CpuExecutor, batch: &Batch) -> Result<(), ModelError> {
        executor.forward(batch)
    }

    /// Runs before logits are read or drawn from. An error is the result of that call.
    fn before_logits(&self) -> Result<(), ModelError> {
        Ok(())
    }

    /// Runs before pages are copied out.
    fn before_copies(&self) {}

    /// Draws.
    fn sample(
        &mut self,
        executor: &mut CpuExecutor,
        rows: &[LogitRow<'_>],
    ) -> Result<Vec<RowOutput>, ModelError> {
        executor.sample(rows)
    }

    /// Returns whether the next step may start before this one is sampled from.
    fn supports_lookahead(&self) -> bool {
        false
    }

    /// Draws, and may start the next step.
    fn sample_and_begin(
        &mut self,
        executor: &mut CpuExecutor,
        rows: &[LogitRow<'_>],
        next: &StepAhead,
    ) -> Result<DrawnAhead, ModelError> {
        executor.sample_and_begin(rows, next)
    }
}

/// A real executor and what stands in front of it.
pub struct Intercepted<I> {
    pub executor: CpuExecutor,
    pub interceptor: I,
}

impl<I: Interceptor> Executor for Intercepted<I> {
    fn limits(&self) -> &ExecutorLimits {
        self.executor.limits()
    }

    fn forward(&mut self, batch: &Batch) -> Result<(), ModelError> {
        self.interceptor.forward(&mut self.executor, batch)
    }

    fn logits(&self, row: usize) -> Result<&[f32], ModelError> {
        self.interceptor.before_logits()?;
        self.executor.logits(row)
    }

    fn sample(&mut self, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        self.interceptor.before_logits()?;
        self.interceptor.sample(&mut self.executor, rows)
    }

    fn supports_lookahead(&self) -> bool {
        self.interceptor.supports_lookahead()
    }

    fn sample_and_begin(
        &mut self,
        rows: &[LogitRow<'_>],
        next: &StepAhead,
    ) -> Result<DrawnAhead, ModelError> {
        self.interceptor.before_logits()?;
        self.interceptor.sample_and_begin(&mut self.executor, rows, next)
    }

    fn plan(&self) -> &MemoryPlan {
        self.executor.plan()
    }

    fn windows(&self) -> Option<WindowLimits> {
        self.executor.windows()
    }

    fn change_windows(&mut self, changes: &[WindowChange]) -> Result<(), ModelError> {
        self.executor.change_windows(changes)
    }

    fn page_form(&self) -> Option<&PageForm> {
        self.executor.page_form()
    }

    fn read_pages(&mut self, pages: &[PageId], out: &mut [u8]) -> Result<(), ModelError> {
        self.interceptor.before_copies();
        self.executor.read_pages(pages, out)
    }

    fn write_pages(&mut self, pages: &[PageId], bytes: &[u8]) -> Result<(), ModelError> {
        self.executor.write_pages(pages, bytes)
    }
}
