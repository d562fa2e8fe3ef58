//! The decoder that Llama, Qwen2, Qwen3 and Mistral share; what differs is in the configuration.
//!
//! Invariant: the configuration's sizes were checked to fit each other before any weight is read. A loaded model never
//! changes: what a step writes is in its executor's rooms and pages, so that several executors can share one model.

use skep_kernels::kv::{KvLayer, MAX_HEAD_SIZE};
use skep_kernels::rope::{Pairing, turns};

use crate::batch::Batch;
use crate::config::{ModelConfig, RopePairing};
use crate::error::ModelError;
use crate::layers::attention::{Attention, AttentionRoom, SequenceRows, StepLayout};
use crate::layers::compute::{Compute, room};
use crate::layers::embedding::{Embedding, Head};
use crate::layers::mlp::{Mlp, MlpRoom};
use crate::layers::norm::RmsNorm;
use crate::weights::{Bias, WeightLoader};

pub(crate) struct Transformer {
    embedding: Embedding,
    blocks: Vec<Block>,
    final_norm: RmsNorm,
    hidden_size: usize,
    inverse_frequencies: Vec<f32>,
}

struct Block {
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_norm: RmsNorm,
    mlp: Mlp,
}

/// Buffers of one step, reused by the next. They belong to one executor.
#[derive(Default)]
pub(crate) struct Rooms {
    hidden: Vec<f32>,
    normed: Vec<f32>,
    projected: Vec<f32>,
    wanted: Vec<f32>,
    attention: AttentionRoom,
    mlp: MlpRoom,
}

impl Transformer {
    pub(crate) fn load(config: &ModelConfig, weights: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        check(config)?;
        let (hidden, vocabulary) = (config.hidden_size, config.vocabulary_size);
        let table = weights.matrix("model.embed_tokens.weight", vocabulary, hidden)?;
        let head = if config.tied_head {
            Head::Tied
        } else {
            Head::Own(weights.matrix("lm_head.weight", vocabulary, hidden)?)
        };
        let blocks = (0..config.layer_count)
            .map(|layer| Block::load(config, layer, weights))
            .collect::<Result<_, _>>()?;
        let final_norm = weights.vector("model.norm.weight", hidden)?;
        Ok(Transformer {
            embedding: Embedding::new(table, head),
            blocks,
            final_norm: RmsNorm::new(final_norm, config.norm_epsilon),
            hidden_size: hidden,
            inverse_frequencies: config.rope.inverse_frequencies(config.head_size),
        })
    }

    /// Runs a checked batch; `logits` gets the wanted rows in order.
    pub(crate) fn forward(
        &self,
        compute: &mut Compute,
        rooms: &mut Rooms,
        kv: &mut [KvLayer],
        batch: &Batch,
        logits: &mut [f32],
    ) -> Result<(), ModelError> {
        let step = self.layout(batch);
        let length = step.tokens * self.hidden_size;
        let hidden = room(&mut rooms.hidden, length);
        let normed = room(&mut rooms.normed, length);
        let projected = room(&mut rooms.projected, length);
        let tokens: Vec<u32> = batch.sequences.iter().flat_map(|rows| rows.tokens.iter().copied()).collect();
        self.embedding.embed(compute, &tokens, hidden)?;
        for (index, (block, kv)) in self.blocks.iter().zip(kv).enumerate() {
            match index {
                0 => block.attention_norm.forward(compute, hidden, normed)?,
                // What the previous block's feed-forward computed is added here, in the norm's pass over the rows.
                _ => block.attention_norm.forward_sum(compute, hidden, projected, normed)?,
            }
            block.attention.forward(compute, &mut rooms.attention, kv, &step, normed, projected)?;
            block.mlp_norm.forward_sum(compute, hidden, projected, normed)?;
            block.mlp.forward(compute, &mut rooms.mlp, normed, step.tokens, projected)?;
        }
        let rows = wanted_rows(batch);
        let length = rows.len() * self.hidden_size;
        let (wanted, addend) = room(&mut rooms.wanted, 2 * length).split_at_mut(length);
        self.gather(&rows, hidden, wanted);
        self.gather(&rows, projected, addend);
        let normed = &mut normed[..length];
        self.final_norm.forward_sum(compute, wanted, addend, normed)?;
        self.embedding.logits(compute, normed, rows.len(), logits)
    }

    fn gather(&self, rows: &[usize], from: &[f32], to: &mut [f32]) {
        for (to, row) in to.chunks_exact_mut(self.hidden_size).zip(rows) {
            to.copy_from_slice(&from[row * self.hidden_size..][..self.hidden_size]);
        }
    }

    fn layout(&self, batch: &Batch) -> StepLayout {
        let mut positions = Vec::new();
        let mut sequences = Vec::with_capacity(batch.sequences.len());
        for sequence in &batch.sequences {
            sequences.push(SequenceRows {
                row: positions.len(),
                tokens: sequence.tokens.len(),
                start: sequence.start,
                pages: sequence.pages.iter().map(|page| page.0).collect(),
            });
            positions.extend(sequence.start..sequence.start + sequence.tokens.len());
        }
        let mut table = Vec::new();
        turns(&positions, &self.inverse_frequencies, &mut table);
        StepLayout { tokens: positions.len(), turns: table, sequences }
    }
}

impl Block {
    fn load(config: &ModelConfig, layer: usize, weights: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        let prefix = format!("model.layers.{layer}");
        let (attention, mlp) = (format!("{prefix}.self_attn"), format!("{prefix}.mlp"));
        let hidden = config.hidden_size;
        let query = config.head_count * config.head_size;
        let kv = config.kv_head_count * config.head_size;
        let norm = |values| RmsNorm::new(values, config.norm_epsilon);
        let head_norms = if config.qk_norm {
            let query = weights.vector(&format!("{attention}.q_norm.weight"), config.head_size)?;
            Some((
                norm(query),
                norm(weights.vector(&format!("{attention}.k_norm.weight"), config.head_size)?),
            ))
        } else {
            None
        };
        let (qkv_bias, mlp_bias) = (Bias::when(config.qkv_bias), Bias::when(config.mlp_bias));
        let feed_forward = config.feed_forward_size;
        Ok(Block {
            attention_norm: norm(weights.vector(&format!("{prefix}.input_layernorm.weight"), hidden)?),
            attention: Attention {
                qkv: weights.linear(
                    &attention,
                    &[("q_proj", query), ("k_proj", kv), ("v_proj", kv)],
                    hidden,
                    qkv_bias,
                )?,
                output: weights.linear(
                    &attention,
                    &[("o_proj", hidden)],
                    query,
                    Bias::when(config.output_bias),
                )?,
                head_norms,
                heads: config.head_count,
                head_size: config.head_size,
                window: config.windows.get(layer).copied().flatten(),
                pairing: match config.rope.pairing {
                    RopePairing::Halves => Pairing::Halves,
                    RopePairing::Interleaved => Pairing::Interleaved,
                },
            },
            mlp_norm: norm(weights.vector(&format!("{prefix}.post_attention_layernorm.weight"), hidden)?),
            mlp: Mlp::new(
                weights.linear(
                    &mlp,
                    &[("gate_proj", feed_forward), ("up_proj", feed_forward)],
                    hidden,
                    mlp_bias,
                )?,
                weights.linear(&mlp, &[("down_proj", hidden)], feed_forward, mlp_bias)?,
            ),
        })
    }
}

/// Rows of the batch whose logits were asked for.
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

/// Sizes that do not fit each other are the configuration's fault; the message names the key.
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
            format!("{heads} heads do not divide over {kv_heads} KV heads"),
        );
    }
    if config.head_size == 0 || !config.head_size.is_multiple_of(2) || config.head_size > MAX_HEAD_SIZE {
        let size = config.head_size;
        return refuse("head_dim", format!("{size} is not an even number between 2 and {MAX_HEAD_SIZE}"));
    }
    if config.windows.contains(&Some(0)) {
        return refuse("sliding_window", "a window of 0 tokens sees nothing".to_owned());
    }
    Ok(())
}
