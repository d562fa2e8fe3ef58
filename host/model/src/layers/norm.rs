//! Root-mean-square normalization with a learned weight.

use skep_kernels::residual::{Norm, add_norm};
use skep_kernels::rms_norm::rms_norm;

use super::compute::Compute;
use crate::error::ModelError;

pub(crate) struct RmsNorm {
    weight: Vec<f32>,
    epsilon: f32,
}

impl RmsNorm {
    /// Normalizes rows in place, by way of `scratch`, which gets the length of the rows.
    pub(crate) fn replace(
        &self,
        compute: &Compute,
        rows: &mut [f32],
        scratch: &mut [f32],
    ) -> Result<(), ModelError> {
        self.forward(compute, rows, scratch)?;
        rows.copy_from_slice(scratch);
        Ok(())
    }

    pub(crate) fn new(weight: Vec<f32>, epsilon: f32) -> Self {
        RmsNorm { weight, epsilon }
    }

    /// Returns the number of values in a row.
    pub(crate) fn width(&self) -> usize {
        self.weight.len()
    }

    /// Normalizes rows that have the length of the weight.
    pub(crate) fn forward(
        &self,
        compute: &Compute,
        input: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        Ok(rms_norm(&compute.pool, compute.isa, input, &self.weight, self.epsilon, out)?)
    }

    /// Adds `addend` to `hidden` and normalizes the sums, in one pass.
    pub(crate) fn forward_sum(
        &self,
        compute: &Compute,
        hidden: &mut [f32],
        addend: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        Ok(add_norm(&compute.pool, compute.isa, hidden, addend, self.as_norm(), out)?)
    }

    pub(crate) fn as_norm(&self) -> Norm<'_> {
        Norm { weight: &self.weight, epsilon: self.epsilon }
    }
}
