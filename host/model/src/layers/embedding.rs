//! Token embeddings, and the head that turns hidden rows into logits.

use skep_kernels::gather::gather;
use skep_kernels::matmul::{PackedMatrix, Projection, matmul};

use super::compute::Compute;
use crate::error::ModelError;

/// The table of token vectors and the output head, which may be the same matrix.
pub(crate) struct Embedding {
    table: PackedMatrix,
    head: Head,
}

/// Where logits come from.
pub(crate) enum Head {
    /// The token table itself.
    Tied,
    Own(PackedMatrix),
}

impl Embedding {
    pub(crate) fn new(table: PackedMatrix, head: Head) -> Self {
        Embedding { table, head }
    }

    pub(crate) fn embed(&self, compute: &Compute, tokens: &[u32], out: &mut [f32]) -> Result<(), ModelError> {
        Ok(gather(&compute.pool, compute.isa, &self.table, tokens, out)?)
    }

    pub(crate) fn logits(
        &self,
        compute: &mut Compute,
        rows: &[f32],
        count: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let matrix = match &self.head {
            Head::Tied => &self.table,
            Head::Own(matrix) => matrix,
        };
        let Compute { pool, isa, activations } = compute;
        let projection = Projection { matrices: &[matrix], bias: &[] };
        Ok(matmul(pool, *isa, projection, rows, count, out, activations)?)
    }
}
