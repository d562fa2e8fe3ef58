//! The decoder that Llama, Qwen2, Qwen3 and Mistral share. The configuration describes their differences.
//!
//! Invariant: the sizes in the configuration are checked against each other before any weight is read. A loaded model
//! never changes: a step writes only to its executor's buffers and pages, so several executors can share one model.
//! The same code runs on every rank; a rank gets the results of other ranks through its communicator.

use std::ops::Range;

use skep_kernels::attention::{AttentionBatch, AttentionSequence};
use skep_kernels::kv::{KvLayer, MAX_HEAD_SIZE};
use skep_kernels::rope::{Pairing, rotary_table};

use crate::batch::Batch;
use crate::communicator::{Communicator, Links};
use crate::config::{ModelConfig, RopePairing};
use crate::error::ModelError;
use crate::layers::attention::{Attention, AttentionWorkspace, StepLayout};
use crate::layers::compute::{Compute, RowWidths, resized};
use crate::layers::embedding::TokenTable;
use crate::layers::mlp::{Mlp, MlpWorkspace};
use crate::layers::norm::RmsNorm;
use crate::models::parts::{Output, Part, parts};
use crate::shard::ShardPlan;
use crate::weights::{Bias, Projection, WeightLoader};

/// The part of a model that one rank holds: some layers, and the rank's part of the weights in each of them.
pub(crate) struct Transformer {
    /// The embedding; present only in the first stage.
    pub(super) entry: Option<TokenTable>,
    pub(super) blocks: Vec<Block>,
    /// The final norm and the head; present only in the last stage.
    pub(super) exit: Option<Exit>,
    pub(super) hidden_size: usize,
    inverse_frequencies: Vec<f32>,
}

/// The part that follows the last layer.
pub(super) struct Exit {
    pub(super) norm: RmsNorm,
    pub(super) head: TokenTable,
}

pub(super) struct Block {
    pub(super) attention_norm: RmsNorm,
    pub(super) attention: Attention,
    pub(super) mlp_norm: RmsNorm,
    pub(super) mlp: Mlp,
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
    mlp: MlpWorkspace,
}

#[cfg(test)]
impl Workspace {
    /// Returns the number of values that memory is allocated for.
    pub(crate) fn capacity(&self) -> usize {
        let rows = [&self.hidden, &self.normed, &self.projected, &self.wanted, &self.logits];
        let layers = self.attention.capacity() + self.mlp.capacity();
        layers + rows.iter().map(|buffer| buffer.capacity()).sum::<usize>()
    }
}

impl Transformer {
    /// Loads all layers, and of each layer the part that the loader's shard holds.
    pub(crate) fn load(config: &ModelConfig, weights: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        check(config)?;
        let (hidden_size, vocabulary_size) = (config.hidden_size, config.vocabulary_size);
        let tokens = weights.shard().part(vocabulary_size, 1);
        let shape = [vocabulary_size, hidden_size];
        let table = |matrix| TokenTable { matrix, tokens: tokens.clone(), vocabulary_size };
        let embedding = weights.table("model.embed_tokens.weight", shape, tokens.clone())?;
        let head = if config.tied_head {
            embedding.clone()
        } else {
            weights.table("lm_head.weight", shape, tokens.clone())?
        };
        let blocks = (0..config.layer_count)
            .map(|layer| Block::load(config, layer, weights))
            .collect::<Result<_, _>>()?;
        let norm = weights.vector("model.norm.weight", hidden_size, &ShardPlan::Replicated)?;
        Ok(Transformer {
            entry: Some(table(embedding)),
            blocks,
            exit: Some(Exit { norm: RmsNorm::new(norm, config.norm_epsilon), head: table(head) }),
            hidden_size,
            inverse_frequencies: config.rope.inverse_frequencies(config.head_size),
        })
    }

    /// Splits the model into pipeline stages. `layers` are consecutive ranges that cover all layers.
    pub(crate) fn into_stages(self, layers: &[Range<usize>]) -> Vec<Transformer> {
        let (mut entry, mut exit) = (self.entry, self.exit);
        let mut blocks = self.blocks.into_iter();
        let stages = layers.iter().enumerate().map(|(stage, range)| Transformer {
            entry: entry.take(),
            blocks: blocks.by_ref().take(range.len()).collect(),
            exit: if stage + 1 == layers.len() { exit.take() } else { None },
            hidden_size: self.hidden_size,
            inverse_frequencies: self.inverse_frequencies.clone(),
        });
        stages.collect()
    }

    /// Runs a checked batch together with the other ranks. The requested rows of logits are written to `logits`, in
    /// order, on the rank that passes one.
    pub(crate) fn forward<C: Communicator>(
        &self,
        compute: &mut Compute,
        workspace: &mut Workspace,
        kv: &mut [KvLayer],
        links: &mut Links<C>,
        batch: &Batch,
        logits: Option<&mut [f32]>,
    ) -> Result<(), ModelError> {
        let step = self.layout(batch);
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

    /// Writes this rank's part of the embeddings of the batch's tokens.
    fn embed(&self, compute: &Compute, batch: &Batch, hidden: &mut [f32]) -> Result<(), ModelError> {
        let Some(table) = &self.entry else { return Ok(()) };
        let tokens = batch.sequences.iter().flat_map(|rows| rows.tokens.iter().copied());
        table.embed(compute, &tokens.collect::<Vec<_>>(), hidden)
    }

    /// Returns the number of KV heads of each layer.
    pub(crate) fn kv_heads(&self) -> impl Iterator<Item = usize> {
        self.blocks.iter().map(|block| block.attention.kv_heads)
    }

    /// Returns the buffer space that each token of a step takes.
    pub(crate) fn row_widths(&self) -> RowWidths {
        let blocks = self.blocks.iter().map(|block| (block.attention.widths(), block.mlp.widths()));
        row_widths(self.hidden_size, self.inverse_frequencies.len(), blocks)
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

    pub(super) fn layout(&self, batch: &Batch) -> StepLayout {
        let mut positions = Vec::new();
        let mut sequences = Vec::with_capacity(batch.sequences.len());
        for sequence in &batch.sequences {
            sequences.push(AttentionSequence {
                row: positions.len(),
                tokens: sequence.tokens.len(),
                start: sequence.start,
                pages: sequence.pages.iter().map(|page| page.0).collect(),
            });
            positions.extend(sequence.start..sequence.start + sequence.tokens.len());
        }
        let mut table = Vec::new();
        rotary_table(&positions, &self.inverse_frequencies, &mut table);
        let first = self.blocks.first().map(|block| &block.attention);
        let queries_per_token = first.map_or(1, |attention| attention.heads / attention.kv_heads);
        let batch = AttentionBatch::new(sequences, queries_per_token);
        StepLayout { tokens: positions.len(), rotary_table: table, batch }
    }
}

/// Returns the buffer space that each token of a step takes, from the widths of the attention and the feed-forward part
/// of each layer.
pub(crate) fn row_widths(
    hidden_size: usize,
    frequencies: usize,
    layers: impl Iterator<Item = (RowWidths, RowWidths)>,
) -> RowWidths {
    let mut widths = RowWidths { workspace: 0, widest_input: hidden_size };
    for (attention, mlp) in layers {
        widths.workspace = widths.workspace.max(attention.workspace.saturating_add(mlp.workspace));
        widths.widest_input = widths.widest_input.max(attention.widest_input).max(mlp.widest_input);
    }
    // One hidden, one normed and one projected row, and two for the requested rows: their values and their addends.
    widths.workspace = widths.workspace.saturating_add(5 * hidden_size);
    // The rotary table of the position.
    widths.workspace = widths.workspace.saturating_add(2 * frequencies);
    widths
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
        kv: &mut KvLayer,
        step: &StepLayout,
    ) -> Result<(), ModelError> {
        let length = step.tokens * self.attention_norm.width();
        let hidden = resized(&mut workspace.hidden, length);
        let normed = resized(&mut workspace.normed, length);
        let projected = resized(&mut workspace.projected, length);
        match part {
            Part::Embedding => Ok(()),
            Part::Attention { adds, .. } => {
                match adds {
                    true => self.attention_norm.forward_sum(compute, hidden, projected, normed)?,
                    false => self.attention_norm.forward(compute, hidden, normed)?,
                }
                self.attention.forward(compute, &mut workspace.attention, kv, step, normed, projected)
            }
            Part::FeedForward { .. } => {
                self.mlp_norm.forward_sum(compute, hidden, projected, normed)?;
                self.mlp.forward(compute, &mut workspace.mlp, normed, step.tokens, projected)
            }
        }
    }

    fn load(config: &ModelConfig, layer: usize, weights: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        let prefix = format!("model.layers.{layer}");
        let hidden = config.hidden_size;
        let norm = |weights: &mut WeightLoader<'_>, name: &str| {
            let values =
                weights.vector(&format!("{prefix}.{name}.weight"), hidden, &ShardPlan::Replicated)?;
            Ok::<_, ModelError>(RmsNorm::new(values, config.norm_epsilon))
        };
        Ok(Block {
            attention_norm: norm(weights, "input_layernorm")?,
            attention: load_attention(config, layer, &format!("{prefix}.self_attn"), weights)?,
            mlp_norm: norm(weights, "post_attention_layernorm")?,
            mlp: load_mlp(config, &format!("{prefix}.mlp"), weights)?,
        })
    }
}

fn load_attention(
    config: &ModelConfig,
    layer: usize,
    prefix: &str,
    weights: &mut WeightLoader<'_>,
) -> Result<Attention, ModelError> {
    let (hidden, head_size) = (config.hidden_size, config.head_size);
    let (query, kv) = (config.head_count * head_size, config.kv_head_count * head_size);
    let heads = weights.shard().heads(config);
    let query_rows = heads.query_rows(head_size);
    let kv_plan = heads.kv_rows(head_size);
    let projections = [
        Projection { name: "q_proj", rows: query, plan: &ShardPlan::Rows(vec![query_rows.clone()]) },
        Projection { name: "k_proj", rows: kv, plan: &kv_plan },
        Projection { name: "v_proj", rows: kv, plan: &kv_plan },
    ];
    let output = Projection { name: "o_proj", rows: hidden, plan: &ShardPlan::Columns(query_rows) };
    let mut norm = |name: &str| {
        let values = weights.vector(&format!("{prefix}.{name}.weight"), head_size, &ShardPlan::Replicated)?;
        Ok::<_, ModelError>(RmsNorm::new(values, config.norm_epsilon))
    };
    let head_norms = if config.qk_norm { Some((norm("q_norm")?, norm("k_norm")?)) } else { None };
    Ok(Attention {
        qkv: weights.linear(prefix, &projections, hidden, Bias::when(config.qkv_bias))?,
        output: weights.linear(prefix, &[output], query, Bias::when(config.output_bias))?,
        head_norms,
        heads: heads.query.len(),
        kv_heads: heads.kv.len(),
        head_size,
        window: config.windows.get(layer).copied().flatten(),
        pairing: match config.rope.pairing {
            RopePairing::Halves => Pairing::Halves,
            RopePairing::Interleaved => Pairing::Interleaved,
        },
    })
}

fn load_mlp(config: &ModelConfig, prefix: &str, weights: &mut WeightLoader<'_>) -> Result<Mlp, ModelError> {
    let (hidden, rows) = (config.hidden_size, config.feed_forward_size);
    let bias = Bias::when(config.mlp_bias);
    let own = weights.shard().part(rows, weights.block_len(&format!("{prefix}.down_proj.weight"))?);
    let plan = &ShardPlan::Rows(vec![own.clone()]);
    let gate_up = [Projection { name: "gate_proj", rows, plan }, Projection { name: "up_proj", rows, plan }];
    let down = Projection { name: "down_proj", rows: hidden, plan: &ShardPlan::Columns(own) };
    Ok(Mlp::new(
        weights.linear(prefix, &gate_up, hidden, bias)?,
        weights.linear(prefix, &[down], rows, bias)?,
    ))
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

/// Checks that the sizes in the configuration fit each other. The error names the configuration key.
fn check(config: &ModelConfig) -> Result<(), ModelError> {
    let refuse = |key: &str, message: String| Err(ModelError::config(key, message));
    for (key, size) in [
        ("hidden_size", config.hidden_size),
        ("num_hidden_layers", config.layer_count),
        ("num_attention_heads", config.head_count),
        ("num_key_value_heads", config.kv_head_count),
        ("intermediate_size", config.feed_forward_size),
        ("vocab_size", config.vocabulary_size),
        ("max_position_embeddings", config.context_length),
    ] {
        if size == 0 || size > 1 << 28 {
            return refuse(key, format!("{size} is not between 1 and {}", 1 << 28));
        }
    }
    if !config.head_count.is_multiple_of(config.kv_head_count) {
        let (heads, kv_heads) = (config.head_count, config.kv_head_count);
        return refuse(
            "num_key_value_heads",
            format!("{heads} heads cannot be divided evenly among {kv_heads} KV heads"),
        );
    }
    if config.head_size == 0 || !config.head_size.is_multiple_of(2) || config.head_size > MAX_HEAD_SIZE {
        let size = config.head_size;
        return refuse("head_dim", format!("{size} is not an even number between 2 and {MAX_HEAD_SIZE}"));
    }
    if config.windows.contains(&Some(0)) {
        return refuse("sliding_window", "the window must be at least 1 token".to_owned());
    }
    Ok(())
}
