//! From a checkpoint's tensors to the forms that layers compute with.
//!
//! Invariant: every shape is checked against the configuration before anything is packed, and an error names the
//! tensor. Only one tensor's pages of the file are in memory beside the packed ones.

use skep_kernels::buffer::Arena;
use skep_kernels::matmul::PackedMatrix;
use skep_kernels::{WorkerPool, dequantize};

use crate::checkpoint::{Checkpoint, Tensor};
use crate::error::ModelError;
use crate::layers::linear::Linear;

/// Reads weights and counts the bytes that they take.
pub(crate) struct WeightLoader<'a> {
    pool: &'a WorkerPool,
    checkpoint: &'a Checkpoint,
    arena: Arena,
    bytes: u64,
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
    /// The threads of `pool` share the packing.
    pub(crate) fn new(pool: &'a WorkerPool, checkpoint: &'a Checkpoint) -> Self {
        WeightLoader { pool, checkpoint, arena: Arena::default(), bytes: 0 }
    }

    /// Bytes of what was loaded so far.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A packed `[rows, columns]` matrix.
    pub(crate) fn matrix(
        &mut self,
        name: &str,
        rows: usize,
        columns: usize,
    ) -> Result<PackedMatrix, ModelError> {
        let tensor = self.tensor(name, &[rows, columns])?;
        let matrix = PackedMatrix::pack(self.pool, &mut self.arena, tensor.dtype, rows, columns, tensor.data)
            .map_err(|error| ModelError::tensor(name, error.to_string()))?;
        self.checkpoint.release(name);
        self.bytes += matrix.byte_len() as u64;
        Ok(matrix)
    }

    /// Projections of one input, side by side: `PREFIX.NAME.weight` with its number of rows each.
    pub(crate) fn linear(
        &mut self,
        prefix: &str,
        parts: &[(&str, usize)],
        columns: usize,
        bias: Bias,
    ) -> Result<Linear, ModelError> {
        let mut matrices = Vec::with_capacity(parts.len());
        let mut biases = Vec::new();
        for (name, rows) in parts {
            matrices.push(self.matrix(&format!("{prefix}.{name}.weight"), *rows, columns)?);
            if bias == Bias::Present {
                biases.extend(self.vector(&format!("{prefix}.{name}.bias"), *rows)?);
            }
        }
        Ok(Linear::new(matrices, biases))
    }

    /// A vector in `f32`.
    pub(crate) fn vector(&mut self, name: &str, length: usize) -> Result<Vec<f32>, ModelError> {
        let tensor = self.tensor(name, &[length])?;
        let mut values = vec![0.0; length];
        dequantize(tensor.dtype, tensor.data, &mut values)
            .map_err(|error| ModelError::tensor(name, error.to_string()))?;
        self.bytes += (length * 4) as u64;
        Ok(values)
    }

    fn tensor(&self, name: &str, shape: &[usize]) -> Result<Tensor<'a>, ModelError> {
        let tensor = self.checkpoint.tensor(name)?;
        if tensor.shape != shape {
            let found = tensor.shape;
            return Err(ModelError::tensor(
                name,
                format!("its shape is {found:?}, the configuration calls for {shape:?}"),
            ));
        }
        Ok(tensor)
    }
}
