//! Root-mean-square normalisation with a learned weight.

use skep_kernels::rms_norm::{rms_norm, rms_norm_heads};

use super::compute::Compute;
use crate::error::ModelError;

pub(crate) struct RmsNorm {
    weight: Vec<f32>,
    epsilon: f32,
}

impl RmsNorm {
    pub(crate) fn new(weight: Vec<f32>, epsilon: f32) -> Self {
        RmsNorm { weight, epsilon }
    }

    /// Normalises rows of the weight's length.
    pub(crate) fn forward(
        &self,
        compute: &Compute,
        input: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        Ok(rms_norm(&compute.pool, compute.isa, input, &self.weight, self.epsilon, out)?)
    }

    /// Normalises each head in some columns of rows, in place.
    pub(crate) fn forward_heads(
        &self,
        compute: &Compute,
        rows: &mut [f32],
        stride: usize,
        columns: std::ops::Range<usize>,
    ) -> Result<(), ModelError> {
        Ok(rms_norm_heads(compute.isa, rows, stride, columns, &self.weight, self.epsilon)?)
    }
}
