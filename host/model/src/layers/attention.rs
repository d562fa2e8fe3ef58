//! Grouped-query attention over paged keys and values.

use skep_kernels::attention::{AttentionBatch, AttentionParams, attention};
use skep_kernels::kv::KvLayer;
use skep_kernels::qkv::{HeadParams, rotate_and_store};
use skep_kernels::rope::Pairing;

use super::compute::{Compute, RowWidths, resized};
use super::linear::Linear;
use super::norm::RmsNorm;
use crate::error::ModelError;

/// The attention of one layer. Head counts and widths are those of the rank that holds it.
pub(crate) struct Attention {
    /// Projection to queries, keys and values, side by side.
    pub(crate) qkv: Linear,
    pub(crate) output: Linear,
    /// Norms of each query head and each key head.
    pub(crate) head_norms: Option<(RmsNorm, RmsNorm)>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_size: usize,
    pub(crate) window: Option<usize>,
    pub(crate) pairing: Pairing,
}

/// Data that all layers of a step share.
pub(crate) struct StepLayout {
    pub(crate) tokens: usize,
    /// Cosines and sines of each row's position: the rotary table.
    pub(crate) rotary_table: Vec<f32>,
    pub(crate) batch: AttentionBatch,
}

/// Buffers of one step, reused by the next.
#[derive(Default)]
pub(crate) struct AttentionWorkspace {
    qkv: Vec<f32>,
    attended: Vec<f32>,
}

#[cfg(test)]
impl AttentionWorkspace {
    pub(crate) fn capacity(&self) -> usize {
        self.qkv.capacity() + self.attended.capacity()
    }
}

impl Attention {
    pub(crate) fn widths(&self) -> RowWidths {
        Self::widths_of(self.qkv.width(), self.heads * self.head_size)
    }

    /// Returns the widths of an attention whose queries, keys and values have `qkv` values, and its queries `attended`.
    pub(crate) fn widths_of(qkv: usize, attended: usize) -> RowWidths {
        RowWidths { workspace: qkv.saturating_add(attended), widest_input: attended }
    }

    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        workspace: &mut AttentionWorkspace,
        kv: &mut KvLayer,
        step: &StepLayout,
        input: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let stride = self.qkv.width();
        let qkv = resized(&mut workspace.qkv, step.tokens * stride);
        self.qkv.forward(compute, input, step.tokens, qkv)?;
        let norms = self.head_norms.as_ref().map(|(query, key)| (query.as_norm(), key.as_norm()));
        let heads = HeadParams { heads: self.heads, pairing: self.pairing, norms };
        let (pool, isa) = (&compute.pool, compute.isa);
        rotate_and_store(pool, isa, heads, qkv, &step.rotary_table, step.batch.sequences(), kv)?;
        let attended = resized(&mut workspace.attended, step.tokens * self.heads * self.head_size);
        let params = AttentionParams {
            heads: self.heads,
            query_stride: stride,
            scale: 1.0 / (self.head_size as f32).sqrt(),
            window: self.window,
        };
        attention(pool, isa, params, kv, qkv, &step.batch, attended)?;
        self.output.forward(compute, attended, step.tokens, out)
    }
}
