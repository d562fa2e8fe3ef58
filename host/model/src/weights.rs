//! Loads a checkpoint's tensors into the forms that layers compute with, either whole or the part of one rank.
//!
//! Invariant: every shape is checked against the configuration before anything is packed, and an error names the
//! tensor. Besides the packed weights, memory holds the file pages of only one tensor, or a copy of its part.

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use skep_kernels::buffer::Arena;
use skep_kernels::matmul::PackedMatrix;
use skep_kernels::{WorkerPool, dequantize};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::ModelError;
use crate::layers::linear::Linear;
use crate::shard::{Shard, ShardPlan};

/// Loads weights and counts the bytes that they take.
pub(crate) struct WeightLoader<'a> {
    pool: &'a WorkerPool,
    checkpoint: &'a Checkpoint,
    shard: Shard,
    arena: Arena,
    bytes: u64,
}

/// One of several projections of the same input.
pub(crate) struct Projection<'a> {
    /// The last component of the tensor's name.
    pub(crate) name: &'a str,
    /// Number of outputs of the whole weight.
    pub(crate) rows: usize,
    pub(crate) plan: &'a ShardPlan,
}

/// Whether a projection has a bias.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Bias {
    Present,
    Absent,
}

impl Bias {
    pub(crate) fn when(present: bool) -> Self {
        if present { Bias::Present } else { Bias::Absent }
    }
}

impl<'a> WeightLoader<'a> {
    /// Creates a loader for the part of the weights that `shard` holds. The threads of `pool` share the packing.
    pub(crate) fn new(pool: &'a WorkerPool, checkpoint: &'a Checkpoint, shard: Shard) -> Self {
        WeightLoader { pool, checkpoint, shard, arena: Arena::default(), bytes: 0 }
    }

    pub(crate) fn shard(&self) -> Shard {
        self.shard
    }

    /// Returns the size of everything loaded so far, in bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the number of consecutive values in a row of the matrix that must stay together.
    pub(crate) fn block_len(&self, name: &str) -> Result<usize, ModelError> {
        Ok(self.checkpoint.tensor(name)?.dtype.block_len())
    }

    /// Loads some rows of the `[rows, columns]` matrix that has one vector per token.
    pub(crate) fn table(
        &mut self,
        name: &str,
        shape: [usize; 2],
        rows: Range<usize>,
    ) -> Result<Arc<PackedMatrix>, ModelError> {
        self.matrix(name, shape, &ShardPlan::Rows(vec![rows])).map(Arc::new)
    }

    /// Loads projections of one input, side by side, from the tensors `PREFIX.NAME.weight`.
    pub(crate) fn linear(
        &mut self,
        prefix: &str,
        projections: &[Projection<'_>],
        columns: usize,
        bias: Bias,
    ) -> Result<Linear, ModelError> {
        let mut matrices = Vec::with_capacity(projections.len());
        let mut biases = Vec::new();
        for Projection { name, rows, plan } in projections {
            matrices.push(self.matrix(&format!("{prefix}.{name}.weight"), [*rows, columns], plan)?);
            if bias == Bias::Present {
                biases.extend(self.vector(&format!("{prefix}.{name}.bias"), *rows, plan)?);
            }
        }
        Ok(Linear::new(matrices, biases))
    }

    /// Loads a vector of `rows` values as `f32`, or the part that belongs to the planned part of its weight.
    pub(crate) fn vector(
        &mut self,
        name: &str,
        rows: usize,
        plan: &ShardPlan,
    ) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[rows])?;
        let mut values = vec![0.0; rows];
        dequantize(tensor.dtype, tensor.data, &mut values)
            .map_err(|error| ModelError::tensor(name, error.to_string()))?;
        match plan {
            ShardPlan::Replicated => {}
            ShardPlan::Rows(ranges) => {
                values = ranges.iter().flat_map(|range| &values[range.clone()]).copied().collect();
            }
            // The ranks' results are added up, so only the first rank adds the bias.
            ShardPlan::Columns(_) if self.shard.rank == 0 => {}
            ShardPlan::Columns(_) => values = Vec::new(),
        }
        self.bytes += (values.len() * 4) as u64;
        Ok(values)
    }

    fn matrix(
        &mut self,
        name: &str,
        [rows, columns]: [usize; 2],
        plan: &ShardPlan,
    ) -> Result<PackedMatrix, ModelError> {
        let tensor = self.tensor(name, &[rows, columns])?;
        let (data, columns) = part(&tensor, columns, plan)?;
        let rows = plan.rows(rows);
        let matrix = PackedMatrix::pack(self.pool, &mut self.arena, tensor.dtype, rows, columns, &data)
            .map_err(|error| ModelError::tensor(name, error.to_string()))?;
        self.checkpoint.release(name);
        self.bytes += matrix.byte_len() as u64;
        Ok(matrix)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        if tensor.shape != shape {
            let found = tensor.shape;
            return Err(ModelError::tensor(
                name,
                format!("its shape is {found:?}, but the configuration requires {shape:?}"),
            ));
        }
        Ok(tensor)
    }
}

/// Returns the bytes of the planned part of a matrix, and its number of columns.
pub(crate) fn part<'a>(
    tensor: &Tensor<'a>,
    columns: usize,
    plan: &ShardPlan,
) -> Result<(Cow<'a, [u8]>, usize), ModelError> {
    let bytes_of = |columns: usize| {
        tensor.dtype.row_bytes(columns).ok_or_else(|| {
            ModelError::tensor(
                tensor.name,
                format!(
                    "{columns} columns are not a whole number of {} blocks of {}",
                    tensor.dtype,
                    tensor.dtype.block_len()
                ),
            )
        })
    };
    let row_bytes = bytes_of(columns)?;
    let rows = |range: &Range<usize>| &tensor.data[range.start * row_bytes..range.end * row_bytes];
    Ok(match plan {
        ShardPlan::Replicated => (Cow::Borrowed(tensor.data), columns),
        ShardPlan::Rows(ranges) => match &ranges[..] {
            [range] => (Cow::Borrowed(rows(range)), columns),
            _ => (Cow::Owned(ranges.iter().map(rows).collect::<Vec<_>>().concat()), columns),
        },
        ShardPlan::Columns(range) if range.len() == columns => (Cow::Borrowed(tensor.data), columns),
        ShardPlan::Columns(range) => {
            let bytes = bytes_of(range.start)?..bytes_of(range.end)?;
            let parts: Vec<&[u8]> =
                tensor.data.chunks_exact(row_bytes).map(|row| &row[bytes.clone()]).collect();
            (Cow::Owned(parts.concat()), range.len())
        }
    })
}
