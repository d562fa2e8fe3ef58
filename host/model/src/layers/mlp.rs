//! The gated feed-forward block.

use skep_kernels::matmul::PackedMatrix;
use skep_kernels::swiglu::{Gate, gated};

use super::compute::{Compute, RowWidths, resized};
use super::linear::Linear;
use crate::error::ModelError;

/// down(g(gate(x)) * up(x)), where the gate decides which function g is.
pub(crate) struct Mlp {
    gate: Gate,
    gate_up: Linear,
    down: Linear,
}

/// Buffers of one step, reused by the next.
#[derive(Default)]
pub(crate) struct MlpWorkspace {
    gate_up: Vec<f32>,
    gated: Vec<f32>,
}

#[cfg(test)]
impl MlpWorkspace {
    pub(crate) fn capacity(&self) -> usize {
        self.gate_up.capacity() + self.gated.capacity()
    }
}

impl Mlp {
    /// Creates the block. `gate_up` computes the gate and the up projection side by side; both have the same width.
    pub(crate) fn new(gate: Gate, gate_up: Linear, down: Linear) -> Self {
        Mlp { gate, gate_up, down }
    }

    pub(crate) fn widths(&self) -> RowWidths {
        Self::widths_of(self.gate_up.width())
    }

    /// Returns the widths of a block whose gates and ups have `both` values together.
    pub(crate) fn widths_of(both: usize) -> RowWidths {
        RowWidths { workspace: both.saturating_add(both / 2), widest_input: both / 2 }
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.gate_up.matrices().chain(self.down.matrices())
    }

    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        workspace: &mut MlpWorkspace,
        input: &[f32],
        tokens: usize,
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let both = self.gate_up.width();
        let width = both / 2;
        let gate_up = resized(&mut workspace.gate_up, tokens * both);
        self.gate_up.forward(compute, input, tokens, gate_up)?;
        let inner = resized(&mut workspace.gated, tokens * width);
        gated(&compute.pool, compute.isa, self.gate, gate_up, width, inner)?;
        self.down.forward(compute, inner, tokens, out)
    }
}
