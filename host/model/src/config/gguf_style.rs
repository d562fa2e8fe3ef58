//! Reads the [`LayerStyle`] of a GGUF model: its experts, its latent attention, its norms, gates and windows.
//!
//! Invariant: a value that changes the arithmetic but is not implemented causes an error that names the key.

use super::gguf::{Keys, tensor};
use super::rope::yarn_magnitude;
use super::style::{Expansion, ExpertForm, Experts, GateKind, Latent, LayerStyle, Norms, Routing, Score};
use super::{Architecture, Rope, RopePairing, RopeScaling};
use crate::error::ModelError;

/// Epsilon of the norms inside latent attention, which no key states.
const LATENT_EPSILON: f32 = 1e-6;
/// The limit of the gates of gpt-oss, which no key states.
const CLAMP: f32 = 7.0;
/// Number of layers of the largest Gemma 3.
const GEMMA3_LARGEST: usize = 62;
/// Writers multiply the weight of YaRN's magnitude by this.
const LOG_MULTIPLIER: f32 = 0.1;

pub(super) fn style(
    keys: &Keys<'_>,
    architecture: Architecture,
    layer_count: usize,
    hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    let experts = || experts(keys, architecture, layer_count).map(Some);
    match architecture {
        Architecture::Qwen3Moe | Architecture::Mixtral => {
            Ok(LayerStyle { experts: experts()?, ..LayerStyle::default() })
        }
        Architecture::DeepSeekV3 => {
            let latent = latent(keys)?;
            let attention_scale = Some(latent_scale(keys, &latent)?);
            let (latent, experts) = (Some(latent), experts()?);
            Ok(LayerStyle { latent, experts, attention_scale, ..LayerStyle::default() })
        }
        Architecture::Glm4Moe => {
            let rotated = keys.size("rope.dimension_count")?;
            Ok(LayerStyle { experts: experts()?, rotated, ..LayerStyle::default() })
        }
        Architecture::GptOss => Ok(LayerStyle {
            experts: experts()?,
            sinks: true,
            gate: GateKind::Clamped(CLAMP),
            ..LayerStyle::default()
        }),
        Architecture::Gemma3 => gemma3(keys, layer_count, hidden_size),
        _ => Ok(LayerStyle::default()),
    }
}

/// Returns the style of Gemma 3, whose files hold the weights of norms with their 1.
fn gemma3(keys: &Keys<'_>, layer_count: usize, hidden_size: usize) -> Result<LayerStyle, ModelError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = keys.float(key)?.filter(|value| *value != 0.0) {
            return Err(ModelError::unsupported(keys.name(key), value, "0"));
        }
    }
    // Scores are scaled by the head size. Only the largest model, which no key marks, divides by that of its hidden rows.
    let heads = keys.required("attention.head_count")?.max(1);
    let scalar = match (layer_count, keys.size("attention.key_length")?) {
        (GEMMA3_LARGEST, _) | (_, None) => hidden_size as f32 / heads as f32,
        (_, Some(size)) => size as f32,
    };
    let theta = keys.float("rope.freq_base_swa")?.map_or(10000.0, |theta| theta as f32);
    Ok(LayerStyle {
        gate: GateKind::GeluTanh,
        norms: Norms::BeforeAndAfter,
        attention_scale: Some(1.0 / scalar.sqrt()),
        embedding_scale: Some((hidden_size as f32).sqrt()),
        windowed_rope: Some(Rope { theta, pairing: RopePairing::Halves, scaling: RopeScaling::None }),
        ..LayerStyle::default()
    })
}

/// Returns the window of each layer.
pub(super) fn windows(
    keys: &Keys<'_>,
    architecture: Architecture,
    layer_count: usize,
    window: Option<usize>,
) -> Result<Vec<Option<usize>>, ModelError> {
    // Without the key, layers alternate as in the models of the family: the last of each run sees everything.
    let usual = match architecture {
        Architecture::GptOss => Some(2),
        Architecture::Gemma3 => Some(6),
        _ => None,
    };
    let run = match usual {
        Some(usual) => Some(keys.size("attention.sliding_window_pattern")?.unwrap_or(usual).max(1)),
        None => None,
    };
    let has_window = |layer: usize| run.is_none_or(|run| !(layer + 1).is_multiple_of(run));
    // The length is bounded here because `check` reports the key only later.
    let layers = 0..layer_count.min(super::MAX_LAYERS);
    Ok(layers.map(|layer| window.filter(|_| has_window(layer))).collect())
}

fn latent(keys: &Keys<'_>) -> Result<Latent, ModelError> {
    let rotated = keys.required("rope.dimension_count")?;
    let head = match keys.size("attention.key_length_mla")? {
        Some(size) => size,
        None => keys.required("attention.key_length")?,
    };
    let value = match keys.size("attention.value_length_mla")? {
        Some(size) => size,
        None => keys.required("attention.value_length")?,
    };
    let unrotated = head.checked_sub(rotated).ok_or_else(|| {
        let problem = format!("is {head}, less than the {rotated} rotated values of a head");
        ModelError::config(keys.name("attention.key_length_mla"), problem)
    })?;
    let rank = keys.required("attention.kv_lora_rank")?;
    Ok(Latent {
        query_rank: keys.size("attention.q_lora_rank")?.filter(|rank| *rank > 0),
        rank,
        unrotated,
        rotated,
        value,
        norm_epsilon: LATENT_EPSILON,
        expansion: match tensor(keys.file, "blk.0.attn_k_b.weight") {
            Some(_) => Expansion::Split,
            None => Expansion::Joined,
        },
    })
}

fn latent_scale(keys: &Keys<'_>, latent: &Latent) -> Result<f32, ModelError> {
    let plain = 1.0 / (latent.head_size().max(1) as f64).sqrt();
    let all = keys.float("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0) as f32 / LOG_MULTIPLIER;
    let factor = keys.float("rope.scaling.factor")?.unwrap_or(1.0) as f32;
    let is_yarn = keys.file.string(&keys.name("rope.scaling.type"))? == Some("yarn");
    let magnitude = if is_yarn && all > 0.0 { yarn_magnitude(factor, all) } else { 1.0 };
    Ok((plain * magnitude * magnitude) as f32)
}

/// Returns YaRN's scaling of a GGUF model. With latent attention, cosines and sines are not scaled, because the magnitude of
/// all dimensions cancels theirs. Every family rounds the bounds to whole pairs, except for gpt-oss.
pub(super) fn yarn(
    keys: &Keys<'_>,
    architecture: Architecture,
    factor: f32,
) -> Result<RopeScaling, ModelError> {
    let number = |key: &str, usual: f32| -> Result<f32, ModelError> {
        Ok(keys.float(key)?.map_or(usual, |value| value as f32))
    };
    let is_latent = architecture == Architecture::DeepSeekV3;
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
        beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
        original_context: keys.required("rope.scaling.original_context_length")?,
        truncated: architecture != Architecture::GptOss,
        magnitude: match is_latent {
            true => 1.0,
            false => yarn_magnitude(factor, 1.0) as f32 * number("rope.scaling.attn_factor", 1.0)?,
        },
    })
}

fn experts(keys: &Keys<'_>, architecture: Architecture, layer_count: usize) -> Result<Experts, ModelError> {
    let size = match (keys.size("expert_feed_forward_length")?, architecture) {
        (Some(size), _) => size,
        (None, Architecture::Mixtral) => keys.required("feed_forward_length")?,
        (None, _) => keys.required("expert_feed_forward_length")?,
    };
    let shared = match architecture {
        Architecture::DeepSeekV3 | Architecture::Glm4Moe => keys.size("expert_shared_count")?.unwrap_or(0),
        _ => 0,
    };
    let first = keys.size("leading_dense_block_count")?.unwrap_or(0);
    let corrected = tensor(keys.file, &format!("blk.{first}.exp_probs_b.bias")).is_some();
    let score = match keys.size("expert_gating_func")? {
        None | Some(1 | 3) if architecture == Architecture::GptOss => Score::SoftmaxOfChosen,
        Some(3) => Score::SoftmaxOfChosen,
        Some(1) => Score::Softmax,
        Some(2) => Score::Sigmoid,
        // Files without the key come from models of both kinds; only the logistic function has a correction.
        None if corrected => Score::Sigmoid,
        None => Score::Softmax,
        Some(other) => {
            return Err(ModelError::unsupported(keys.name("expert_gating_func"), other, "1, 2, 3"));
        }
    };
    let normalized = match keys.file.boolean(&keys.name("expert_weights_norm"))? {
        Some(normalized) => normalized,
        None => matches!(architecture, Architecture::Qwen3Moe | Architecture::Mixtral) || corrected,
    };
    let scale = keys.float("expert_weights_scale")?.map_or(1.0, |scale| scale as f32);
    Ok(Experts {
        count: keys.required("expert_count")?,
        used: keys.required("expert_used_count")?,
        size,
        shared_size: shared.saturating_mul(size),
        layers: (0..layer_count.min(super::MAX_LAYERS)).map(|layer| layer >= first).collect(),
        routing: Routing {
            score,
            groups: keys.size("expert_group_count")?.unwrap_or(1).max(1),
            used_groups: keys.size("expert_group_used_count")?.unwrap_or(1).max(1),
            corrected,
            normalized,
            scale: if scale == 0.0 { 1.0 } else { scale },
        },
        biased: tensor(keys.file, "blk.0.ffn_gate_exps.bias").is_some(),
        form: ExpertForm::Separate,
    })
}
