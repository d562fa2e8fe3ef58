//! The resources that every layer computes with: threads, an instruction set tier, and reusable buffers.

use skep_kernels::matmul::Activations;
use skep_kernels::{Isa, WorkerPool};

/// The compute resources of one executor.
pub(crate) struct Compute {
    pub(crate) pool: WorkerPool,
    pub(crate) isa: Isa,
    pub(crate) activations: Activations,
}

/// The buffer space that one token of a step takes, in values.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowWidths {
    /// Values that the workspace holds for the token.
    pub(crate) workspace: usize,
    /// Width of the widest input of a projection.
    pub(crate) widest_input: usize,
}

impl RowWidths {
    /// Grows to the space that another part takes in the same buffers.
    pub(crate) fn widen(&mut self, other: RowWidths) {
        self.workspace = self.workspace.max(other.workspace);
        self.widest_input = self.widest_input.max(other.widest_input);
    }
}

/// Returns the first `length` values of `buffer`, which grows to the largest step and is then reused. Their
/// contents are unspecified.
pub(crate) fn resized(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if buffer.len() < length {
        // The memory plan counts exactly the values in use, so no spare capacity may be reserved.
        buffer.reserve_exact(length - buffer.len());
        buffer.resize(length, 0.0);
    }
    &mut buffer[..length]
}
