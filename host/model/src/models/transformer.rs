//! The decoder that all families share. The configuration describes their differences; [`super::load`] builds it.
//!
//! Invariant: a loaded model never changes: a step writes only to its executor's buffers and pages, so several executors can share one model.
//! The same code runs on every rank; a rank gets the results of other ranks through its communicator.

use std::ops::Range;

use skep_kernels::attention::{AttentionBatch, AttentionSequence};
use skep_kernels::rope::rotary_table;

use crate::batch::Batch;
use crate::communicator::{Communicator, Links};
use crate::error::ModelError;
use crate::expert_load::StageLoad;
use crate::layers::attention::{Attention, AttentionShape, AttentionWorkspace, StepLayout};
use crate::layers::cache::{CacheShape, LayerCache};
use crate::layers::compute::{Compute, RowWidths, resized};
use crate::layers::embedding::TokenTable;
use crate::layers::latent::{LatentAttention, LatentWorkspace};
use crate::layers::mixture::{Mixture, MixtureWorkspace};
use crate::layers::mlp::Mlp;
use crate::layers::norm::RmsNorm;
use crate::models::parts::{Completion, Completions, Input, Output, Part, parts};

/// The part of a model that one rank holds: some layers, and the rank's part of the weights in each of them.
pub(crate) struct Transformer {
    /// The embedding; present only in the first stage.
    pub(super) entry: Option<TokenTable>,
    pub(super) blocks: Vec<Block>,
    /// The final norm and the head; present only in the last stage.
    pub(super) exit: Option<Exit>,
    pub(super) hidden_size: usize,
    /// The rotation of layers without a window, and that of layers with one if it differs.
    pub(super) rotations: Vec<Rotation>,
    /// The factor of the embeddings.
    pub(super) embedding_scale: Option<f32>,
    pub(super) completions: Completions,
    /// Size of the embedding.
    pub(super) entry_bytes: u64,
}

/// The part that follows the last layer.
pub(super) struct Exit {
    pub(super) norm: RmsNorm,
    pub(super) head: TokenTable,
    /// Size of both, without a head that is the embedding.
    pub(super) bytes: u64,
}

pub(super) struct Block {
    pub(super) attention_norm: RmsNorm,
    pub(super) attention: LayerAttention,
    pub(super) mlp_norm: RmsNorm,
    pub(super) feed_forward: FeedForward,
    /// Norms of the outputs of the attention and of the feed-forward part, once all ranks have added up theirs.
    pub(super) after: Option<[RmsNorm; 2]>,
    /// Size of its weights.
    pub(super) bytes: u64,
}

pub(super) enum LayerAttention {
    Grouped(Box<Attention>),
    Latent(Box<LatentAttention>),
}

pub(super) enum FeedForward {
    Dense(Mlp),
    Experts(Mixture),
}

/// A rotation of heads: the angle per position of each pair, and the factor of cosines and sines.
#[derive(Clone)]
pub(super) struct Rotation {
    pub(super) inverse_frequencies: Vec<f32>,
    pub(super) magnitude: f32,
}

/// Buffers of one step, reused by the next. They belong to one executor.
#[derive(Default)]
pub(crate) struct Workspace {
    pub(super) hidden: Vec<f32>,
    pub(super) normed: Vec<f32>,
    pub(super) projected: Vec<f32>,
    wanted: Vec<f32>,
    logits: Vec<f32>,
    attention: AttentionWorkspace,
    latent: LatentWorkspace,
    mixture: MixtureWorkspace,
    /// Counts the tokens of the experts, on one rank of each stage.
    pub(crate) load: Option<StageLoad>,
}

#[cfg(test)]
impl Workspace {
    /// Returns the number of values that memory is allocated for.
    pub(crate) fn capacity(&self) -> usize {
        let rows = [&self.hidden, &self.normed, &self.projected, &self.wanted, &self.logits];
        let layers = self.attention.capacity() + self.latent.capacity() + self.mixture.capacity();
        layers + rows.iter().map(|buffer| buffer.capacity()).sum::<usize>()
    }
}

impl Transformer {
    /// Splits the model into pipeline stages. `layers` are consecutive ranges that cover all layers.
    pub(crate) fn into_stages(self, layers: &[Range<usize>]) -> Vec<Transformer> {
        let (mut entry, mut exit) = (self.entry, self.exit);
        let mut blocks = self.blocks.into_iter();
        let stages = layers.iter().enumerate().map(|(stage, range)| Transformer {
            entry: entry.take(),
            blocks: blocks.by_ref().take(range.len()).collect(),
            exit: if stage + 1 == layers.len() { exit.take() } else { None },
            hidden_size: self.hidden_size,
            rotations: self.rotations.clone(),
            embedding_scale: self.embedding_scale,
            completions: self.completions,
            entry_bytes: self.entry_bytes,
        });
        stages.collect()
    }

    /// Returns the size of the weights. A head that is also the embedding counts for the stage with the embedding.
    pub(crate) fn weight_bytes(&self) -> u64 {
        let entry = if self.entry.is_some() { self.entry_bytes } else { 0 };
        let blocks: u64 = self.blocks.iter().map(|block| block.bytes).sum();
        entry + blocks + self.exit.as_ref().map_or(0, |exit| exit.bytes)
    }

    /// Runs a checked batch together with the other ranks. `windowed` has the pages of each sequence in layers with a window, if
    /// they are not those of the other layers. The requested rows of logits are written to `logits`, in
    /// order, on the rank that passes one.
    pub(crate) fn forward<C: Communicator>(
        &self,
        compute: &mut Compute,
        workspace: &mut Workspace,
        kv: &mut [LayerCache],
        links: &mut Links<C>,
        (batch, windowed): (&Batch, Option<Vec<Vec<u32>>>),
        logits: Option<&mut [f32]>,
    ) -> Result<(), ModelError> {
        let step = self.layout(batch, windowed);
        let length = step.tokens * self.hidden_size;
        resized(&mut workspace.hidden, length);
        let stage = links.pipeline.rank();
        resized(&mut workspace.projected, length);
        if self.entry.is_none() {
            links.pipeline.receive(stage - 1, &mut workspace.hidden[..length])?;
        }
        for part in parts(self.entry.is_some(), self.blocks.len(), false) {
            match part {
                Part::Embedding => self.embed(compute, batch, &mut workspace.hidden[..length])?,
                Part::Attention { layer, .. } | Part::FeedForward { layer } => {
                    self.blocks[layer].compute(part, compute, workspace, &mut kv[layer], &step)?;
                }
            }
            links.tensor.all_reduce(match part.output() {
                Output::Hidden => &mut workspace.hidden[..length],
                Output::Projected => &mut workspace.projected[..length],
            })?;
            self.complete(part, compute, workspace, length)?;
        }
        match &self.exit {
            Some(exit) => exit.forward(compute, workspace, &mut links.tensor, &wanted_rows(batch), logits),
            None => {
                let hidden = &mut workspace.hidden[..length];
                hidden.iter_mut().zip(&workspace.projected).for_each(|(sum, value)| *sum += value);
                links.pipeline.send(stage + 1, hidden)
            }
        }
    }

    /// Completes the output of a part, which all ranks have added up.
    fn complete(
        &self,
        part: Part,
        compute: &Compute,
        workspace: &mut Workspace,
        length: usize,
    ) -> Result<(), ModelError> {
        match part.completion(self.completions) {
            Completion::Nothing => Ok(()),
            Completion::Scale => {
                let scale = self.embedding_scale.expect("the completions follow from the same description");
                workspace.hidden[..length].iter_mut().for_each(|value| *value *= scale);
                Ok(())
            }
            Completion::Norm => {
                let (layer, which) = match part {
                    Part::Embedding => return Ok(()),
                    Part::Attention { layer, .. } => (layer, 0),
                    Part::FeedForward { layer } => (layer, 1),
                };
                let norms = self.blocks[layer].after.as_ref();
                let norm = &norms.expect("the completions follow from the same description")[which];
                let scratch = resized(&mut workspace.normed, length);
                norm.replace(compute, &mut workspace.projected[..length], scratch)
            }
        }
    }

    /// Writes this rank's part of the embeddings of the batch's tokens.
    fn embed(&self, compute: &Compute, batch: &Batch, hidden: &mut [f32]) -> Result<(), ModelError> {
        let Some(table) = &self.entry else { return Ok(()) };
        let tokens = batch.sequences.iter().flat_map(|rows| rows.tokens.iter().copied());
        table.embed(compute, &tokens.collect::<Vec<_>>(), hidden)
    }

    /// Returns what each layer keeps for a token.
    pub(crate) fn caches(&self) -> impl Iterator<Item = CacheShape> {
        self.blocks.iter().map(|block| block.attention.cache())
    }

    /// Returns the heads of each layer.
    pub(crate) fn attention_shapes(&self) -> impl Iterator<Item = AttentionShape> {
        self.blocks.iter().map(|block| match &block.attention {
            LayerAttention::Grouped(attention) => attention.shape(),
            LayerAttention::Latent(attention) => attention.attention_shape(),
        })
    }

    /// Returns the number of experts of each layer, which is 0 for a layer without any.
    pub(crate) fn experts(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|block| match &block.feed_forward {
            FeedForward::Dense(_) => 0,
            FeedForward::Experts(mixture) => mixture.experts.len(),
        })
    }

    /// Returns whether each layer has a window.
    pub(crate) fn windowed(&self) -> impl Iterator<Item = bool> {
        self.blocks.iter().map(|block| match &block.attention {
            LayerAttention::Grouped(attention) => attention.window.is_some(),
            LayerAttention::Latent(_) => false,
        })
    }

    /// Returns the buffer space that each token of a step takes.
    pub(crate) fn row_widths(&self) -> RowWidths {
        // Layers of one kind share their buffers; those of different kinds have buffers of their own.
        let mut kinds = [RowWidths::default(); 4];
        for block in &self.blocks {
            match &block.attention {
                LayerAttention::Grouped(attention) => kinds[0].widen(attention.widths()),
                LayerAttention::Latent(attention) => kinds[1].widen(attention.widths()),
            }
            match &block.feed_forward {
                FeedForward::Dense(mlp) => kinds[2].widen(mlp.widths()),
                FeedForward::Experts(mixture) => {
                    kinds[2].widen(mixture.shared_widths());
                    kinds[3].widen(mixture.widths());
                }
            }
        }
        let frequencies = self.rotations.iter().map(|rotation| rotation.inverse_frequencies.len()).sum();
        row_widths(self.hidden_size, frequencies, &kinds)
    }

    /// Returns the number of values in a row of logits. It is 0 for every stage but the last.
    pub(crate) fn vocabulary_size(&self) -> usize {
        self.exit.as_ref().map_or(0, |exit| exit.head.vocabulary_size)
    }

    /// Returns the number of values that the workspace holds for each row of logits, not counting the logits themselves.
    pub(crate) fn partial_logits(&self) -> usize {
        let head = self.exit.as_ref().map(|exit| &exit.head);
        head.filter(|head| !head.is_whole()).map_or(0, |head| head.tokens.len())
    }

    pub(super) fn layout(&self, batch: &Batch, windowed: Option<Vec<Vec<u32>>>) -> StepLayout {
        let mut positions = Vec::new();
        let mut sequences = Vec::with_capacity(batch.sequences.len());
        for sequence in &batch.sequences {
            let (row, tokens, start) = (positions.len(), sequence.tokens.len(), sequence.start);
            let pages = sequence.pages.iter().map(|page| page.0).collect();
            sequences.push(AttentionSequence { row, tokens, start, pages });
            positions.extend(start..start + tokens);
        }
        let rotary_tables = self.rotations.iter().map(|rotation| rotation.table(&positions)).collect();
        let first = self.blocks.first().map(|block| &block.attention);
        let batch = AttentionBatch::new(sequences, first.map_or(1, LayerAttention::queries_per_token));
        let windowed = windowed.map(|pages| batch.with_pages(pages));
        StepLayout { tokens: positions.len(), rotary_tables, batch, windowed }
    }
}

/// Returns the buffer space that each token of a step takes, from the widest part of each kind.
pub(crate) fn row_widths(hidden_size: usize, frequencies: usize, kinds: &[RowWidths]) -> RowWidths {
    let mut widths = RowWidths { workspace: 0, widest_input: hidden_size };
    for kind in kinds {
        widths.workspace = widths.workspace.saturating_add(kind.workspace);
        widths.widest_input = widths.widest_input.max(kind.widest_input);
    }
    // One hidden, one normed and one projected row, and two for the requested rows: their values and their addends.
    widths.workspace = widths.workspace.saturating_add(5 * hidden_size);
    // The rotary table of the position.
    widths.workspace = widths.workspace.saturating_add(2 * frequencies);
    widths
}

impl Rotation {
    /// Returns the rotary table of some positions.
    fn table(&self, positions: &[usize]) -> Vec<f32> {
        let mut table = Vec::new();
        rotary_table(positions, &self.inverse_frequencies, &mut table);
        if self.magnitude != 1.0 {
            table.iter_mut().for_each(|value| *value *= self.magnitude);
        }
        table
    }
}

impl LayerAttention {
    pub(super) fn cache(&self) -> CacheShape {
        match self {
            LayerAttention::Grouped(attention) => attention.cache(),
            LayerAttention::Latent(attention) => attention.cache(),
        }
    }

    /// Returns the number of queries of a token that read the same keys.
    fn queries_per_token(&self) -> usize {
        match self {
            LayerAttention::Grouped(attention) => attention.heads / attention.kv_heads,
            LayerAttention::Latent(attention) => attention.absorb.len(),
        }
    }
}

impl Exit {
    /// Computes the logits of the given rows of the last block's output.
    pub(super) fn forward<C: Communicator>(
        &self,
        compute: &mut Compute,
        workspace: &mut Workspace,
        ranks: &mut C,
        rows: &[usize],
        logits: Option<&mut [f32]>,
    ) -> Result<(), ModelError> {
        if rows.is_empty() {
            return Ok(());
        }
        let width = self.norm.width();
        let length = rows.len() * width;
        let (wanted, addend) = resized(&mut workspace.wanted, 2 * length).split_at_mut(length);
        for (at, row) in rows.iter().enumerate() {
            wanted[at * width..][..width].copy_from_slice(&workspace.hidden[row * width..][..width]);
            addend[at * width..][..width].copy_from_slice(&workspace.projected[row * width..][..width]);
        }
        let normed = resized(&mut workspace.normed, length);
        self.norm.forward_sum(compute, wanted, addend, normed)?;
        self.head.logits(compute, ranks, normed, rows.len(), &mut workspace.logits, logits)
    }
}

impl Block {
    /// Computes this rank's output of one of the block's parts.
    pub(super) fn compute(
        &self,
        part: Part,
        compute: &mut Compute,
        workspace: &mut Workspace,
        cache: &mut LayerCache,
        step: &StepLayout,
    ) -> Result<(), ModelError> {
        let length = step.tokens * self.attention_norm.width();
        let hidden = resized(&mut workspace.hidden, length);
        let normed = resized(&mut workspace.normed, length);
        let projected = resized(&mut workspace.projected, length);
        let norm = match part {
            Part::Embedding => return Ok(()),
            Part::Attention { .. } => &self.attention_norm,
            Part::FeedForward { .. } => &self.mlp_norm,
        };
        match part.input() {
            Input::Tokens => {}
            Input::Hidden => norm.forward(compute, hidden, normed)?,
            Input::Sum => norm.forward_sum(compute, hidden, projected, normed)?,
        }
        match part {
            Part::Embedding => Ok(()),
            Part::Attention { .. } => match (&self.attention, cache) {
                (LayerAttention::Grouped(attention), LayerCache::Grouped(kv)) => {
                    attention.forward(compute, &mut workspace.attention, kv, step, normed, projected)
                }
                (LayerAttention::Latent(attention), LayerCache::Latent(latents)) => {
                    attention.forward(compute, &mut workspace.latent, latents, step, normed, projected)
                }
                _ => Err(ModelError::Batch {
                    problem: "the pages of a layer were made for another kind of attention".to_owned(),
                }),
            },
            Part::FeedForward { layer } => {
                let (tokens, load, workspace) = (step.tokens, &workspace.load, &mut workspace.mixture);
                match &self.feed_forward {
                    FeedForward::Dense(mlp) => {
                        mlp.forward(compute, &mut workspace.shared, normed, tokens, projected)
                    }
                    FeedForward::Experts(mixture) => {
                        mixture.forward(compute, workspace, normed, tokens, projected)?;
                        if let Some(load) = load {
                            load.count(layer, workspace.tokens_of_experts());
                        }
                        Ok(())
                    }
                }
            }
        }
    }
}

/// Returns the rows of the batch whose logits were requested.
fn wanted_rows(batch: &Batch) -> Vec<usize> {
    let mut rows = Vec::new();
    let mut first = 0;
    for sequence in &batch.sequences {
        let end = first + sequence.tokens.len();
        rows.extend(end - sequence.logit_rows()..end);
        first = end;
    }
    rows
}
