//! Builds a model from its configuration and its weights.
//!
//! Invariant: the sizes in the configuration are checked against each other before any weight is read. Each family is
//! built by the same code, from what [`crate::config::LayerStyle`] describes.

use skep_kernels::kv::{MAX_HEAD_SIZE, MAX_LATENT};
use skep_kernels::rope::Pairing;
use skep_kernels::swiglu::Gate;

use super::transformer::{Block, Exit, FeedForward, LayerAttention, Rotation, Transformer};
use crate::config::{Experts, GateKind, Latent, ModelConfig, Norms, Rope, RopePairing};
use crate::error::ModelError;
use crate::layers::attention::{Attention, LayerRotation};
use crate::layers::embedding::TokenTable;
use crate::layers::latent::LatentAttention;
use crate::layers::linear::Linear;
use crate::layers::mixture::Mixture;
use crate::layers::mlp::Mlp;
use crate::layers::norm::RmsNorm;
use crate::layers::router::Router;
use crate::shard::ShardPlan;
use crate::weights::{Bias, Projection, WeightLoader};

impl Transformer {
    /// Loads all layers, and of each layer the part that the loader's shard holds.
    pub(crate) fn load(config: &ModelConfig, weights: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        check(config)?;
        let (hidden_size, vocabulary_size) = (config.hidden_size, config.vocabulary_size);
        let tokens = weights.shard().part(vocabulary_size, 1);
        let shape = [vocabulary_size, hidden_size];
        let table = |matrix| TokenTable { matrix, tokens: tokens.clone(), vocabulary_size };
        let start = weights.bytes();
        let embedding = weights.table("model.embed_tokens.weight", shape, tokens.clone())?;
        let entry_bytes = weights.bytes() - start;
        let head = if config.tied_head {
            embedding.clone()
        } else {
            weights.table("lm_head.weight", shape, tokens.clone())?
        };
        let head_bytes = weights.bytes() - start - entry_bytes;
        let blocks = (0..config.layer_count)
            .map(|layer| Block::load(config, layer, weights))
            .collect::<Result<_, _>>()?;
        let before = weights.bytes();
        let norm = norm(config, weights, "model.norm", hidden_size)?;
        let norm_bytes = weights.bytes() - before;
        let rotation = |rope: &Rope| Rotation {
            inverse_frequencies: rope.inverse_frequencies(config.rotated()),
            magnitude: rope.magnitude(),
        };
        let ropes = [Some(&config.rope), config.style.windowed_rope.as_ref()];
        Ok(Transformer {
            entry: Some(table(embedding)),
            blocks,
            exit: Some(Exit { norm, head: table(head), bytes: head_bytes + norm_bytes }),
            hidden_size,
            rotations: ropes.into_iter().flatten().map(rotation).collect(),
            embedding_scale: config.style.embedding_scale,
            completions: (&config.style).into(),
            entry_bytes,
        })
    }
}

impl Block {
    fn load(config: &ModelConfig, layer: usize, weights: &mut WeightLoader<'_>) -> Result<Self, ModelError> {
        let prefix = format!("model.layers.{layer}");
        let before = weights.bytes();
        let mut norm = |name: &str| norm(config, weights, &format!("{prefix}.{name}"), config.hidden_size);
        let (attention_norm, mlp_norm, after) = match config.style.norms {
            Norms::Before => (norm("input_layernorm")?, norm("post_attention_layernorm")?, None),
            Norms::BeforeAndAfter | Norms::BeforeAndAfterPlusOne => (
                norm("input_layernorm")?,
                norm("pre_feedforward_layernorm")?,
                Some([norm("post_attention_layernorm")?, norm("post_feedforward_layernorm")?]),
            ),
        };
        let attention = match &config.style.latent {
            Some(latent) => {
                LayerAttention::Latent(Box::new(latent_attention(config, latent, &prefix, weights)?))
            }
            None => LayerAttention::Grouped(Box::new(attention(config, layer, &prefix, weights)?)),
        };
        let feed_forward = match config.style.experts_of(layer) {
            Some(experts) => FeedForward::Experts(mixture(config, experts, &prefix, weights)?),
            None => {
                let bias = Bias::when(config.mlp_bias);
                let width = config.feed_forward_size;
                FeedForward::Dense(mlp(config, &format!("{prefix}.mlp"), width, bias, weights)?)
            }
        };
        let bytes = weights.bytes() - before;
        Ok(Block { attention_norm, attention, mlp_norm, feed_forward, after, bytes })
    }
}

/// Loads the norm of rows of `width` values.
fn norm(
    config: &ModelConfig,
    weights: &mut WeightLoader<'_>,
    name: &str,
    width: usize,
) -> Result<RmsNorm, ModelError> {
    let mut values = weights.vector(&format!("{name}.weight"), width, &ShardPlan::Replicated)?;
    let offset = config.style.norms.offset();
    values.iter_mut().for_each(|value| *value += offset);
    Ok(RmsNorm::new(values, config.norm_epsilon))
}

fn pairing(config: &ModelConfig) -> Pairing {
    match config.rope.pairing {
        RopePairing::Halves => Pairing::Halves,
        RopePairing::Interleaved => Pairing::Interleaved,
    }
}

fn gate(config: &ModelConfig) -> Gate {
    match config.style.gate {
        GateKind::Silu => Gate::Silu,
        GateKind::GeluTanh => Gate::GeluTanh,
        GateKind::Clamped(limit) => Gate::Clamped { limit },
    }
}

fn attention(
    config: &ModelConfig,
    layer: usize,
    prefix: &str,
    weights: &mut WeightLoader<'_>,
) -> Result<Attention, ModelError> {
    let prefix = &format!("{prefix}.self_attn");
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
    let head_norms = match config.qk_norm {
        true => {
            let mut norm = |name: &str| norm(config, weights, &format!("{prefix}.{name}"), head_size);
            Some((norm("q_norm")?, norm("k_norm")?))
        }
        false => None,
    };
    let own = &ShardPlan::Rows(vec![heads.query.clone()]);
    let sinks = match config.style.sinks {
        true => weights.vector(&format!("{prefix}.sinks"), config.head_count, own)?,
        false => Vec::new(),
    };
    let window = config.windows.get(layer).copied().flatten();
    let has_own_table = window.is_some() && config.style.windowed_rope.is_some();
    Ok(Attention {
        qkv: weights.linear(prefix, &projections, hidden, Bias::when(config.qkv_bias))?,
        output: weights.linear(prefix, &[output], query, Bias::when(config.output_bias))?,
        head_norms,
        heads: heads.query.len(),
        kv_heads: heads.kv.len(),
        head_size,
        window,
        rotation: LayerRotation {
            table: usize::from(has_own_table),
            rotated: config.rotated(),
            pairing: pairing(config),
        },
        scale: config.attention_scale(),
        sinks,
    })
}

fn latent_attention(
    config: &ModelConfig,
    latent: &Latent,
    prefix: &str,
    weights: &mut WeightLoader<'_>,
) -> Result<LatentAttention, ModelError> {
    let prefix = &format!("{prefix}.self_attn");
    let (hidden, count) = (config.hidden_size, config.head_count);
    let heads = weights.shard().part(count, 1);
    let rows = |size: usize| {
        let own = heads.start * size..heads.end * size;
        ShardPlan::Rows(vec![own])
    };
    let inner = |weights: &mut WeightLoader<'_>, name: &str, width: usize| {
        let name = format!("{prefix}.{name}.weight");
        let values = weights.vector(&name, width, &ShardPlan::Replicated)?;
        Ok::<_, ModelError>(RmsNorm::new(values, latent.norm_epsilon))
    };
    let whole = &ShardPlan::Replicated;
    let query_plan = &rows(latent.head_size());
    let query_rows = count * latent.head_size();
    let (narrow, queries) = match latent.query_rank {
        Some(rank) => {
            let narrow = Projection { name: "q_a_proj", rows: rank, plan: whole };
            let narrow = weights.linear(prefix, &[narrow], hidden, Bias::Absent)?;
            let norm = inner(weights, "q_a_layernorm", rank)?;
            let wide = Projection { name: "q_b_proj", rows: query_rows, plan: query_plan };
            (Some((narrow, norm)), weights.linear(prefix, &[wide], rank, Bias::Absent)?)
        }
        None => {
            let wide = Projection { name: "q_proj", rows: query_rows, plan: query_plan };
            (None, weights.linear(prefix, &[wide], hidden, Bias::Absent)?)
        }
    };
    let down = Projection { name: "kv_a_proj_with_mqa", rows: latent.rank + latent.rotated, plan: whole };
    let latents = weights.linear(prefix, &[down], hidden, Bias::Absent)?;
    let latent_norm = inner(weights, "kv_a_layernorm", latent.rank)?;
    let (absorb, values) = weights.expansion(prefix, latent, count, heads.clone())?;
    let columns = ShardPlan::Columns(heads.start * latent.value..heads.end * latent.value);
    let output = Projection { name: "o_proj", rows: hidden, plan: &columns };
    Ok(LatentAttention {
        narrow,
        queries,
        latents,
        latent_norm,
        absorb,
        values,
        output: weights.linear(prefix, &[output], count * latent.value, Bias::Absent)?,
        shape: *latent,
        scale: config.attention_scale(),
        pairing: pairing(config),
    })
}

fn mlp(
    config: &ModelConfig,
    prefix: &str,
    width: usize,
    bias: Bias,
    weights: &mut WeightLoader<'_>,
) -> Result<Mlp, ModelError> {
    let hidden = config.hidden_size;
    let own = weights.shard().part(width, weights.block_len(&format!("{prefix}.down_proj.weight"))?);
    let plan = &ShardPlan::Rows(vec![own.clone()]);
    let gate_up = [
        Projection { name: "gate_proj", rows: width, plan },
        Projection { name: "up_proj", rows: width, plan },
    ];
    let down = Projection { name: "down_proj", rows: hidden, plan: &ShardPlan::Columns(own) };
    Ok(Mlp::new(
        gate(config),
        weights.linear(prefix, &gate_up, hidden, bias)?,
        weights.linear(prefix, &[down], width, bias)?,
    ))
}

fn mixture(
    config: &ModelConfig,
    experts: &Experts,
    prefix: &str,
    weights: &mut WeightLoader<'_>,
) -> Result<Mixture, ModelError> {
    let prefix = &format!("{prefix}.{}", experts.form.module());
    let hidden = config.hidden_size;
    let router = format!("{prefix}.{}", experts.form.router());
    let matrix = weights.exact_matrix(&format!("{router}.weight"), [experts.count, hidden])?;
    let whole = &ShardPlan::Replicated;
    let bias = match experts.biased {
        true => weights.vector(&format!("{router}.bias"), experts.count, whole)?,
        false => Vec::new(),
    };
    let correction = match experts.routing.corrected {
        true => weights.vector(&format!("{router}.e_score_correction_bias"), experts.count, whole)?,
        false => Vec::new(),
    };
    let own = weights.expert_part(prefix, experts)?;
    let loaded = (0..experts.count)
        .map(|expert| weights.expert(prefix, experts, expert, hidden, own.clone()))
        .collect::<Result<_, _>>()?;
    let shared = match experts.shared_size {
        0 => None,
        width => Some(mlp(config, &format!("{prefix}.shared_experts"), width, Bias::Absent, weights)?),
    };
    let scores = Linear::new(vec![matrix], bias);
    Ok(Mixture {
        router: Router { scores, correction, routing: experts.routing, used: experts.used },
        experts: loaded,
        shared,
        gate: gate(config),
        hidden_size: hidden,
        size: own.len(),
    })
}

/// Checks that the kernels support the sizes in the configuration. The error names the configuration key.
fn check(config: &ModelConfig) -> Result<(), ModelError> {
    let refuse = |key: &str, message: String| Err(ModelError::config(key, message));
    if let Some(latent) = &config.style.latent {
        let (rank, rotated) = (latent.rank, latent.rotated);
        if !rank.is_multiple_of(16) || rank > MAX_LATENT {
            return refuse("kv_lora_rank", format!("{rank} is not a multiple of 16 up to {MAX_LATENT}"));
        }
        if rotated > MAX_HEAD_SIZE {
            return refuse("qk_rope_head_dim", format!("{rotated} is above {MAX_HEAD_SIZE}"));
        }
        return Ok(());
    }
    if config.head_size > MAX_HEAD_SIZE {
        let size = config.head_size;
        return refuse("head_dim", format!("{size} is not an even number between 2 and {MAX_HEAD_SIZE}"));
    }
    Ok(())
}
