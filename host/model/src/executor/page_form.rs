//! The form in which pages of keys and values leave an executor, and the order of their bytes.
//!
//! Invariant: pages may be exchanged between executors whose forms have the same description. The description holds
//! everything that the bytes depend on besides the weights and the tokens: the model's shapes and rotation, the format, the
//! instruction tier or the kind of device, the number of tensor-parallel ranks, and the version of this crate. The bytes are
//! ordered by layer and then by rank, so they do not depend on the stages of a pipeline.

use std::fmt;

use super::{ExecutorOptions, WeightConversion};
use crate::batch::{PAGE_TOKENS, PageId};
use crate::config::ModelConfig;
use crate::error::ModelError;

/// The version of the order of a page's bytes and of the sums that they come from. A change of it makes all stored pages useless.
const ORDER_VERSION: u32 = 4;

/// The form of an executor's pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PageForm {
    /// Number of bytes of a page in all layers.
    pub bytes: usize,
    /// A text that is equal for two executors only if each can continue from the other's pages.
    pub description: String,
}

impl PageForm {
    /// Describes the pages that are computed `on` something, such as an instruction tier.
    pub(super) fn new(
        config: &ModelConfig,
        options: &ExecutorOptions,
        on: impl fmt::Debug,
        bytes: usize,
    ) -> Self {
        let ModelConfig { architecture, rope, windows, style, .. } = config;
        let ExecutorOptions { kv, exact_weights, weights, tensor_parallel, .. } = options;
        let sizes = [
            config.layer_count,
            config.hidden_size,
            config.head_count,
            config.kv_head_count,
            config.head_size,
            config.feed_forward_size,
            config.rotated(),
        ];
        let switches = [
            config.qkv_bias,
            config.output_bias,
            config.mlp_bias,
            config.qk_norm,
            config.tied_head,
            *exact_weights,
        ];
        let kind = if style.latent.is_some() { "latents" } else { "grouped heads" };
        let description = format!(
            "order {ORDER_VERSION}, version {version}; {kind} as {kv}, {PAGE_TOKENS} tokens and {bytes} bytes a page; \
             {tensor_parallel} ranks on {on:?}; {architecture:?} {sizes:?} {switches:?} epsilon {epsilon:?}; \
             {rope:?}; {windows:?}; {style:?}",
            version = env!("CARGO_PKG_VERSION"),
            epsilon = config.norm_epsilon,
        );
        // Pages that were computed before weights could be converted are those of the files' formats.
        let description = match weights {
            WeightConversion::Keep => description,
            converted => format!("{description}; weights as {converted}"),
        };
        PageForm { bytes, description }
    }
}

/// The offsets of the parts of one page in its bytes: each rank has the layers of its stage.
pub(super) struct PageParts {
    /// For each rank, the offset and the length of each of its layers within a page.
    ranks: Vec<Vec<(usize, usize)>>,
    pub(super) bytes: usize,
}

impl PageParts {
    /// Lays out the bytes of a page. `layers` has the bytes of each layer of each rank. Ranks are ordered by stage.
    pub(super) fn new(layers: &[Vec<usize>], tensor_parallel: usize) -> Self {
        let mut ranks: Vec<Vec<(usize, usize)>> = vec![Vec::new(); layers.len()];
        let mut bytes = 0;
        for (stage, own) in layers.chunks(tensor_parallel.max(1)).enumerate() {
            for layer in 0..own.first().map_or(0, Vec::len) {
                for (rank, lengths) in own.iter().enumerate() {
                    let length = lengths.get(layer).copied().unwrap_or(0);
                    ranks[stage * tensor_parallel + rank].push((bytes, length));
                    bytes += length;
                }
            }
        }
        PageParts { ranks, bytes }
    }

    /// Returns the number of bytes of one page that a rank holds.
    pub(super) fn rank_bytes(&self, rank: usize) -> usize {
        self.ranks[rank].iter().map(|(_, length)| length).sum()
    }

    /// Returns the offset and the length of each layer of a rank within a page.
    pub(super) fn of_rank(&self, rank: usize) -> &[(usize, usize)] {
        &self.ranks[rank]
    }

    /// Copies a rank's part of some pages to its offsets in `pages`.
    pub(super) fn join(&self, rank: usize, mut part: &[u8], pages: &mut [u8]) {
        for page in pages.chunks_exact_mut(self.bytes.max(1)) {
            for (offset, length) in &self.ranks[rank] {
                let (own, rest) = part.split_at(*length);
                page[*offset..offset + length].copy_from_slice(own);
                part = rest;
            }
        }
    }

    /// Returns a rank's part of some pages.
    pub(super) fn part(&self, rank: usize, pages: &[u8]) -> Vec<u8> {
        let count = pages.len() / self.bytes.max(1);
        let mut part = Vec::with_capacity(count * self.rank_bytes(rank));
        for page in pages.chunks_exact(self.bytes.max(1)) {
            for (offset, length) in &self.ranks[rank] {
                part.extend_from_slice(&page[*offset..offset + length]);
            }
        }
        part
    }
}

/// Rejects pages that do not exist and buffers of another length.
pub(super) fn check_pages(
    pages: &[PageId],
    page_count: usize,
    bytes: usize,
    page_bytes: usize,
) -> Result<(), ModelError> {
    if let Some(page) = pages.iter().find(|page| page.0 as usize >= page_count) {
        let problem = format!("page {} was requested, but there are {page_count} pages", page.0);
        return Err(ModelError::Batch { problem });
    }
    if pages.len().checked_mul(page_bytes) != Some(bytes) {
        let problem = format!("{bytes} bytes were given for {} pages of {page_bytes} bytes", pages.len());
        return Err(ModelError::Batch { problem });
    }
    Ok(())
}

/// Returns the error of an executor whose pages cannot leave it.
pub(super) fn unsupported() -> ModelError {
    ModelError::Batch {
        problem: "the pages of this executor can be neither exported nor imported".to_owned(),
    }
}

#[cfg(test)]
#[path = "page_form_tests.rs"]
mod tests;
