//! Token embeddings, and the head that turns hidden rows into logits. Ranks split both by vocabulary tokens.

use std::ops::Range;
use std::sync::Arc;

use skep_kernels::gather::gather;
use skep_kernels::matmul::{PackedMatrix, Projection, matmul};

use super::compute::{Compute, resized};
use crate::communicator::Communicator;
use crate::error::ModelError;
use crate::shard::Shard;

/// The vectors of the vocabulary tokens that this rank holds. An embedding and a head may share one matrix.
pub(crate) struct TokenTable {
    pub(crate) matrix: Arc<PackedMatrix>,
    /// The tokens that the rows of the matrix belong to.
    pub(crate) tokens: Range<usize>,
    pub(crate) vocabulary_size: usize,
}

impl TokenTable {
    /// Writes the embeddings of `tokens` to `out`. If the table is split, the embedding of each token is on one rank,
    /// and the others write zeros.
    pub(crate) fn embed(&self, compute: &Compute, tokens: &[u32], out: &mut [f32]) -> Result<(), ModelError> {
        if self.is_whole() {
            return Ok(gather(&compute.pool, compute.isa, &self.matrix, tokens, out)?);
        }
        let width = self.matrix.columns();
        out.fill(0.0);
        for (token, row) in tokens.iter().zip(out.chunks_exact_mut(width)) {
            if self.tokens.contains(&(*token as usize)) {
                let own = *token - self.tokens.start as u32;
                gather(&compute.pool, compute.isa, &self.matrix, &[own], row)?;
            }
        }
        Ok(())
    }

    /// Computes the logits of `count` rows and writes them to `out` on the rank that has one. The other ranks pass
    /// `None` and contribute their part.
    pub(crate) fn logits<C: Communicator>(
        &self,
        compute: &mut Compute,
        ranks: &mut C,
        rows: &[f32],
        count: usize,
        own: &mut Vec<f32>,
        out: Option<&mut [f32]>,
    ) -> Result<(), ModelError> {
        let Compute { pool, isa, activations } = compute;
        let projection = Projection { matrices: &[&self.matrix], bias: &[] };
        match out {
            Some(out) if self.is_whole() => {
                Ok(matmul(pool, *isa, projection, rows, count, out, activations)?)
            }
            out => {
                let own = resized(own, count * self.tokens.len());
                matmul(pool, *isa, projection, rows, count, own, activations)?;
                let (vocabulary, group) = (self.vocabulary_size, ranks.ranks());
                let mut out = out;
                ranks.all_gather(own, count * vocabulary, |rank, part| {
                    let Some(out) = out.as_deref_mut() else { return };
                    let tokens = Shard { rank, ranks: group }.part(vocabulary, 1);
                    if tokens.is_empty() {
                        return;
                    }
                    for (out, part) in out.chunks_exact_mut(vocabulary).zip(part.chunks_exact(tokens.len())) {
                        out[tokens.clone()].copy_from_slice(part);
                    }
                })
            }
        }
    }

    /// Returns whether this rank holds the whole vocabulary.
    pub(crate) fn is_whole(&self) -> bool {
        self.tokens.len() == self.vocabulary_size
    }
}
