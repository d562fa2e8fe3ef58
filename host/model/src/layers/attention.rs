//! Grouped-query attention over paged keys and values.

use skep_kernels::attention::{AttentionBatch, AttentionParams, attention};
use skep_kernels::kv::KvLayer;
use skep_kernels::matmul::PackedMatrix;
use skep_kernels::qkv::{HeadParams, rotate_and_store};
use skep_kernels::rope::Pairing;

use super::cache::CacheShape;
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
    pub(crate) rotation: LayerRotation,
    pub(crate) scale: f32,
    /// Either empty or, for each head, the score of a position without a value.
    pub(crate) sinks: Vec<f32>,
}

/// The heads and the window of a layer's attention, by which its memory beside its operands is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionShape {
    pub(crate) heads: usize,
    /// 1 for latents, which all heads read.
    pub(crate) kv_heads: usize,
    /// Number of values of a head, or of a latent.
    pub(crate) value_size: usize,
    pub(crate) window: Option<usize>,
}

/// How a layer rotates its heads.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LayerRotation {
    /// The index of its rotary table.
    pub(crate) table: usize,
    /// Number of values of each head that rotate, from the first on.
    pub(crate) rotated: usize,
    pub(crate) pairing: Pairing,
}

/// Data that all layers of a step share.
pub(crate) struct StepLayout {
    pub(crate) tokens: usize,
    /// Cosines and sines of each row's position: a rotary table for each kind of rotation.
    pub(crate) rotary_tables: Vec<Vec<f32>>,
    pub(crate) batch: AttentionBatch,
    /// The same sequences with the pages of layers with a window, if those are other ones.
    pub(crate) windowed: Option<AttentionBatch>,
}

impl StepLayout {
    pub(crate) fn rotary_table(&self, index: usize) -> &[f32] {
        self.rotary_tables.get(index).map(Vec::as_slice).unwrap_or_default()
    }

    /// Returns the sequences with the pages of a layer.
    pub(crate) fn batch_of(&self, has_window: bool) -> &AttentionBatch {
        self.windowed.as_ref().filter(|_| has_window).unwrap_or(&self.batch)
    }
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

    pub(crate) fn shape(&self) -> AttentionShape {
        let Attention { heads, kv_heads, head_size, window, .. } = *self;
        AttentionShape { heads, kv_heads, value_size: head_size, window }
    }

    pub(crate) fn cache(&self) -> CacheShape {
        CacheShape::Grouped { kv_heads: self.kv_heads, head_size: self.head_size }
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        self.qkv.matrices().chain(self.output.matrices())
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
        let LayerRotation { table, rotated, pairing } = self.rotation;
        let heads = HeadParams { heads: self.heads, rotated, pairing, norms };
        let (pool, isa) = (&compute.pool, compute.isa);
        let batch = step.batch_of(self.window.is_some());
        rotate_and_store(pool, isa, heads, qkv, step.rotary_table(table), batch.sequences(), kv)?;
        let attended = resized(&mut workspace.attended, step.tokens * self.heads * self.head_size);
        let params = AttentionParams {
            heads: self.heads,
            query_stride: stride,
            scale: self.scale,
            window: self.window,
            sinks: &self.sinks,
        };
        attention(pool, isa, params, kv, qkv, batch, attended)?;
        self.output.forward(compute, attended, step.tokens, out)
    }
}
