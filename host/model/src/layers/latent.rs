//! Multi-head latent attention, computed on the latents themselves.
//!
//! Invariant: every rank keeps whole latents and computes its own heads. Queries are multiplied by the matrix that would
//! expand latents to keys, so that no key or value is ever expanded. Source: DeepSeek-V2 (2024), section 2.1.

use skep_kernels::grouped::{GroupedProduct, grouped_matmul};
use skep_kernels::latent::{
    LatentLayer, QueryShape, latent_attention, query_width, split_queries, store_latents,
};
use skep_kernels::matmul::PackedMatrix;
use skep_kernels::rope::Pairing;

use super::attention::{AttentionShape, StepLayout};
use super::cache::CacheShape;
use super::compute::{Compute, RowWidths, resized};
use super::linear::Linear;
use super::norm::RmsNorm;
use crate::config::Latent;
use crate::error::ModelError;

/// The latent attention of one layer. Head counts and widths are those of the rank that holds it.
pub(crate) struct LatentAttention {
    /// The projection to a narrow row and its norm, if queries have one.
    pub(crate) narrow: Option<(Linear, RmsNorm)>,
    /// The projection to the query heads.
    pub(crate) queries: Linear,
    /// The projection to the latent and the key that is rotated.
    pub(crate) latents: Linear,
    pub(crate) latent_norm: RmsNorm,
    /// For each head, the matrix from a query without position to a latent.
    pub(crate) absorb: Vec<PackedMatrix>,
    /// For each head, the matrix from a latent to a value.
    pub(crate) values: Vec<PackedMatrix>,
    pub(crate) output: Linear,
    pub(crate) shape: Latent,
    pub(crate) scale: f32,
    pub(crate) pairing: Pairing,
}

/// Buffers of one step, reused by the next. Those of heads are `[head][token]`.
#[derive(Default)]
pub(crate) struct LatentWorkspace {
    narrow: Vec<f32>,
    narrow_normed: Vec<f32>,
    queries: Vec<f32>,
    latents: Vec<f32>,
    unrotated: Vec<f32>,
    absorbed: Vec<f32>,
    attended: Vec<f32>,
    values: Vec<f32>,
}

#[cfg(test)]
impl LatentWorkspace {
    pub(crate) fn capacity(&self) -> usize {
        let narrow = [&self.narrow, &self.narrow_normed, &self.queries, &self.latents];
        let wide = [&self.unrotated, &self.absorbed, &self.attended, &self.values];
        narrow.iter().chain(&wide).map(|buffer| buffer.capacity()).sum()
    }
}

impl LatentAttention {
    fn heads(&self) -> usize {
        self.absorb.len()
    }

    pub(crate) fn attention_shape(&self) -> AttentionShape {
        AttentionShape { heads: self.heads(), kv_heads: 1, value_size: self.shape.rank, window: None }
    }

    pub(crate) fn cache(&self) -> CacheShape {
        CacheShape::Latent { rank: self.shape.rank, rotated: self.shape.rotated }
    }

    pub(crate) fn widths(&self) -> RowWidths {
        let Latent { rank, unrotated, rotated, value, .. } = self.shape;
        let narrow = self.narrow.as_ref().map_or(0, |(narrow, _)| narrow.width());
        let head = self.shape.head_size() + unrotated + query_width(rank, rotated) + rank + value;
        let workspace = 2 * narrow + rank + rotated + self.heads() * head;
        RowWidths { workspace, widest_input: narrow.max(self.heads() * rank.max(unrotated).max(value)) }
    }

    pub(crate) fn matrices(&self) -> impl Iterator<Item = &PackedMatrix> {
        let narrow = self.narrow.iter().flat_map(|(narrow, _)| narrow.matrices());
        let wide = self.queries.matrices().chain(self.latents.matrices()).chain(self.output.matrices());
        narrow.chain(wide).chain(&self.absorb).chain(&self.values)
    }

    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        workspace: &mut LatentWorkspace,
        cache: &mut LatentLayer,
        step: &StepLayout,
        input: &[f32],
        out: &mut [f32],
    ) -> Result<(), ModelError> {
        let (tokens, heads) = (step.tokens, self.heads());
        let Latent { rank, unrotated, rotated, value, .. } = self.shape;
        let LatentWorkspace { narrow, narrow_normed, .. } = workspace;
        let input_of_queries = match &self.narrow {
            Some((projection, norm)) => {
                let narrow = resized(narrow, tokens * projection.width());
                let normed = resized(narrow_normed, tokens * projection.width());
                projection.forward(compute, input, tokens, narrow)?;
                norm.forward(compute, narrow, normed)?;
                &*normed
            }
            None => input,
        };
        let queries = resized(&mut workspace.queries, tokens * heads * self.shape.head_size());
        self.queries.forward(compute, input_of_queries, tokens, queries)?;
        let latents = resized(&mut workspace.latents, tokens * (rank + rotated));
        self.latents.forward(compute, input, tokens, latents)?;
        let (table, sequences) = (step.rotary_table(0), step.batch.sequences());
        let norm = self.latent_norm.as_norm();
        let (isa, pairing) = (compute.isa, self.pairing);
        store_latents(&compute.pool, isa, norm, pairing, latents, table, sequences, cache)?;
        let width = cache.query_width();
        let plain = resized(&mut workspace.unrotated, heads * tokens * unrotated);
        let absorbed = resized(&mut workspace.absorbed, heads * tokens * width);
        let shape = QueryShape { heads, unrotated, rotated, pairing };
        split_queries(&compute.pool, isa, shape, queries, table, plain, absorbed, width)?;
        let rows = |head: usize| head * tokens..(head + 1) * tokens;
        let products = self.absorb.iter().enumerate().map(|(head, matrix)| GroupedProduct {
            matrix,
            rows: rows(head),
            out_row: head * tokens,
            out_column: 0,
            bias: &[],
        });
        let products: Vec<_> = products.collect();
        let Compute { pool, activations, .. } = compute;
        grouped_matmul(pool, isa, &products, plain, unrotated, absorbed, width, activations)?;
        let attended = resized(&mut workspace.attended, heads * tokens * rank);
        latent_attention(pool, isa, heads, self.scale, cache, absorbed, &step.batch, attended)?;
        let values = resized(&mut workspace.values, tokens * heads * value);
        let products = self.values.iter().enumerate().map(|(head, matrix)| GroupedProduct {
            matrix,
            rows: rows(head),
            out_row: 0,
            out_column: head * value,
            bias: &[],
        });
        let products: Vec<_> = products.collect();
        grouped_matmul(pool, isa, &products, attended, rank, values, heads * value, activations)?;
        self.output.forward(compute, values, tokens, out)
    }
}
