//! What every layer computes with: threads, an instruction tier, and reusable workspaces.

use skep_kernels::matmul::Activations;
use skep_kernels::{Isa, WorkerPool};

/// One executor's compute resources.
pub(crate) struct Compute {
    pub(crate) pool: WorkerPool,
    pub(crate) isa: Isa,
    pub(crate) activations: Activations,
}

/// What a token of a step takes.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RowWidths {
    /// Values that the workspace holds for it.
    pub(crate) workspace: usize,
    /// Values of the widest input of a projection.
    pub(crate) widest_input: usize,
}

/// `length` values of `buffer`, which grows to the largest step and is then reused. Contents are unspecified.
pub(crate) fn resized(buffer: &mut Vec<f32>, length: usize) -> &mut [f32] {
    if buffer.len() < length {
        // The plan counts what is used, so nothing is reserved beyond it.
        buffer.reserve_exact(length - buffer.len());
        buffer.resize(length, 0.0);
    }
    &mut buffer[..length]
}
