//! The gated feed-forward block.

use skep_kernels::DType;
use skep_kernels::swiglu::swiglu;

use super::compute::{Compute, RowWidths, resized};
use super::linear::Linear;
use crate::error::ModelError;

/// down(silu(gate(x)) * up(x))
pub(crate) struct Mlp {
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
    /// `gate_up` computes the gate and the up projection side by side; both have the same width.
    pub(crate) fn new(gate_up: Linear, down: Linear) -> Self {
        Mlp { gate_up, down }
    }

    pub(crate) fn widths(&self) -> RowWidths {
        Self::widths_of(self.gate_up.width())
    }

    /// Returns the widths of a block whose gates and ups have `both` values together.
    pub(crate) fn widths_of(both: usize) -> RowWidths {
        RowWidths { workspace: both.saturating_add(both / 2), widest_input: both / 2 }
    }

    /// Returns the formats of the weights.
    pub(crate) fn dtypes(&self) -> impl Iterator<Item = DType> {
        self.gate_up.dtypes().chain(self.down.dtypes())
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
        let gated = resized(&mut workspace.gated, tokens * width);
        swiglu(&compute.pool, compute.isa, gate_up, width, gated)?;
        self.down.forward(compute, gated, tokens, out)
    }
}
