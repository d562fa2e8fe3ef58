//! The place of an executor that has failed, until there is another one.

use skep_model::{Batch, Executor, ExecutorLimits, LogitRow, MemoryPlan, ModelError, RowOutput};

/// Computes nothing. It has the limits of the executor whose place it takes.
pub(crate) struct LostExecutor {
    limits: ExecutorLimits,
    plan: MemoryPlan,
}

impl LostExecutor {
    /// Creates one with the limits and the plan of an executor.
    pub fn instead_of(executor: &dyn Executor) -> Self {
        LostExecutor { limits: *executor.limits(), plan: *executor.plan() }
    }
}

impl Executor for LostExecutor {
    fn limits(&self) -> &ExecutorLimits {
        &self.limits
    }

    fn forward(&mut self, _batch: &Batch) -> Result<(), ModelError> {
        Err(lost())
    }

    fn logits(&self, _row: usize) -> Result<&[f32], ModelError> {
        Err(lost())
    }

    fn sample(&mut self, _rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        Err(lost())
    }

    fn plan(&self) -> &MemoryPlan {
        &self.plan
    }
}

fn lost() -> ModelError {
    ModelError::Batch { problem: "the executor has failed, and is being started again".to_owned() }
}
