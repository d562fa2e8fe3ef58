//! A projection, or several projections of the same input computed at once.

use skep_kernels::matmul::{PackedMatrix, Projection, matmul};

use super::compute::Compute;
use crate::error::ModelError;

/// out = input × weightsᵀ + bias, with the outputs of the matrices side by side.
pub(crate) struct Linear {
    matrices: Vec<PackedMatrix>,
    /// Empty, or one value per output.
    bias: Vec<f32>,
}

impl Linear {
    pub(crate) fn new(matrices: Vec<PackedMatrix>, bias: Vec<f32>) -> Self {
        Linear { matrices, bias }
    }

    /// Returns the number of values per output row.
    pub(crate) fn width(&self) -> usize {
        self.matrices.iter().map(PackedMatrix::rows).sum()
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.matrices.iter()
    }

    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        input: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let matrices: Vec<&PackedMatrix> = self.matrices.iter().collect();
        let Compute { pool, isa, activations } = compute;
        let projection = Projection { matrices: &matrices, bias: &self.bias };
        Ok(matmul(pool, *isa, projection, input, tokens, out, activations)?)
    }
}
