//! The logits of the last successful step.

use skep_kernels::Isa;

use super::ExecutorLimits;
use crate::error::ModelError;
use crate::layers::compute;
use crate::sampling::{LogitRow, RowOutput, draw};

/// Returns the error for a row that the last step does not have.
pub(super) fn no_row(row: usize, rows: usize) -> ModelError {
    ModelError::Batch { problem: format!("logit row {row} does not exist; the last step has {rows} rows") }
}

pub(super) struct StepLogits {
    values: Vec<f32>,
    width: usize,
    rows: usize,
}

impl StepLogits {
    pub(super) fn new(vocabulary_size: usize) -> Self {
        StepLogits { values: Vec::new(), width: vocabulary_size, rows: 0 }
    }

    /// Returns the size of the logits of the largest step, in bytes.
    pub(super) fn byte_len(limits: &ExecutorLimits) -> u64 {
        limits.max_logit_rows.saturating_mul(limits.vocabulary_size).saturating_mul(4) as u64
    }

    /// Discards the rows of the last step, before a step that may fail.
    pub(super) fn clear(&mut self) {
        self.rows = 0;
    }

    /// Returns a buffer for the rows of a step.
    pub(super) fn buffer(&mut self, rows: usize) -> &mut [f32] {
        compute::resized(&mut self.values, rows * self.width)
    }

    /// Records that the buffer holds the rows of a step.
    pub(super) fn keep(&mut self, rows: usize) {
        self.rows = rows;
    }

    pub(super) fn row(&self, row: usize) -> Result<&[f32], ModelError> {
        if row >= self.rows {
            return Err(no_row(row, self.rows));
        }
        Ok(&self.values[row * self.width..][..self.width])
    }

    pub(super) fn sample(&self, isa: Isa, rows: &[LogitRow<'_>]) -> Result<Vec<RowOutput>, ModelError> {
        rows.iter().map(|row| draw(isa, self.row(row.row())?, row)).collect()
    }
}
