//! Grouped-query attention over paged keys and values.

use skep_kernels::attention::{AttentionParams, AttentionSequence, KvLayer, PAGE_TOKENS, attention};
use skep_kernels::rope::{Pairing, RopeParams, rope};

use super::compute::{Compute, room};
use super::linear::Linear;
use super::norm::RmsNorm;
use crate::error::ModelError;

/// One layer's attention: shapes are those of the model.
pub(crate) struct Attention {
    /// Queries, keys and values side by side.
    pub(crate) qkv: Linear,
    pub(crate) output: Linear,
    /// Norms of each query and key head.
    pub(crate) head_norms: Option<(RmsNorm, RmsNorm)>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_size: usize,
    pub(crate) window: Option<usize>,
    pub(crate) pairing: Pairing,
}

/// What all layers of a step share.
pub(crate) struct StepLayout {
    pub(crate) tokens: usize,
    /// Cosines and sines of each row's position.
    pub(crate) turns: Vec<f32>,
    pub(crate) sequences: Vec<SequenceRows>,
}

/// Consecutive rows of one sequence.
pub(crate) struct SequenceRows {
    pub(crate) row: usize,
    pub(crate) tokens: usize,
    pub(crate) start: usize,
    pub(crate) pages: Vec<u32>,
}

/// Room for one step.
#[derive(Default)]
pub(crate) struct AttentionRoom {
    qkv: Vec<f32>,
    attended: Vec<f32>,
}

impl Attention {
    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        rooms: &mut AttentionRoom,
        kv: &mut KvLayer,
        step: &StepLayout,
        input: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let stride = self.qkv.width();
        let qkv = room(&mut rooms.qkv, step.tokens * stride);
        self.qkv.forward(compute, input, step.tokens, qkv)?;
        let (query_width, kv_width) = (self.heads * self.head_size, self.kv_heads * self.head_size);
        let keys_end = query_width + kv_width;
        if let Some((query_norm, key_norm)) = &self.head_norms {
            query_norm.forward_heads(compute, qkv, stride, 0..query_width)?;
            key_norm.forward_heads(compute, qkv, stride, query_width..keys_end)?;
        }
        let heads = self.heads + self.kv_heads;
        let turned = RopeParams { stride, heads, head_size: self.head_size, pairing: self.pairing };
        rope(&compute.pool, compute.isa, turned, qkv, &step.turns)?;
        for sequence in &step.sequences {
            for token in 0..sequence.tokens {
                let row = &qkv[(sequence.row + token) * stride..][..stride];
                let (page, slot) = page_of(sequence, sequence.start + token)?;
                kv.write(compute.isa, page, slot, &row[query_width..keys_end], &row[keys_end..])?;
            }
        }
        let attended = room(&mut rooms.attended, step.tokens * query_width);
        let params = AttentionParams {
            heads: self.heads,
            query_stride: stride,
            scale: 1.0 / (self.head_size as f32).sqrt(),
            window: self.window,
        };
        let sequences: Vec<AttentionSequence<'_>> = step
            .sequences
            .iter()
            .map(|rows| AttentionSequence {
                row: rows.row,
                tokens: rows.tokens,
                start: rows.start,
                pages: &rows.pages,
            })
            .collect();
        attention(&compute.pool, compute.isa, params, kv, qkv, &sequences, attended)?;
        self.output.forward(compute, attended, step.tokens, out)
    }
}

fn page_of(sequence: &SequenceRows, position: usize) -> Result<(u32, usize), ModelError> {
    let page = sequence.pages.get(position / PAGE_TOKENS).ok_or_else(|| ModelError::Batch {
        problem: format!("position {position} of a sequence has no page"),
    })?;
    Ok((*page, position % PAGE_TOKENS))
}
