//! Reads the [`LayerStyle`] of a GGUF model: its experts and its latent attention.
//!
//! Invariant: a value that changes the arithmetic but is not implemented causes an error that names the key.

use super::gguf::{Keys, tensor};
use super::rope::yarn_magnitude;
use super::style::{Expansion, ExpertForm, Experts, Latent, LayerStyle, Routing, Score};
use super::{Architecture, RopeScaling};
use crate::error::ModelError;

/// Epsilon of the norms inside latent attention, which no key states.
const LATENT_EPSILON: f32 = 1e-6;
/// Writers multiply the weight of YaRN's magnitude by this.
const LOG_MULTIPLIER: f32 = 0.1;

pub(super) fn style(
    keys: &Keys<'_>,
    architecture: Architecture,
    layer_count: usize,
) -> Result<LayerStyle, ModelError> {
    let latent = match architecture {
        Architecture::DeepSeekV3 => Some(latent(keys)?),
        _ => None,
    };
    let experts = match architecture {
        Architecture::Qwen3Moe | Architecture::DeepSeekV3 => Some(experts(keys, architecture, layer_count)?),
        _ => None,
    };
    let attention_scale = latent.as_ref().map(|latent| latent_scale(keys, latent)).transpose()?;
    Ok(LayerStyle { latent, experts, attention_scale, ..LayerStyle::default() })
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

/// Returns YaRN's scaling of a GGUF model with latent attention. Its cosines and sines are not scaled, because the
/// magnitude of all dimensions cancels theirs.
pub(super) fn yarn(keys: &Keys<'_>, factor: f32) -> Result<RopeScaling, ModelError> {
    let beta = |key: &str, usual: f32| -> Result<f32, ModelError> {
        Ok(keys.float(key)?.map_or(usual, |value| value as f32))
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: beta("rope.scaling.yarn_beta_fast", 32.0)?,
        beta_slow: beta("rope.scaling.yarn_beta_slow", 1.0)?,
        original_context: keys.required("rope.scaling.original_context_length")?,
        truncated: true,
        magnitude: 1.0,
    })
}

fn experts(keys: &Keys<'_>, architecture: Architecture, layer_count: usize) -> Result<Experts, ModelError> {
    let size = keys.required("expert_feed_forward_length")?;
    let shared = match architecture {
        Architecture::DeepSeekV3 => keys.size("expert_shared_count")?.unwrap_or(0),
        _ => 0,
    };
    let first = keys.size("leading_dense_block_count")?.unwrap_or(0);
    let corrected = tensor(keys.file, &format!("blk.{first}.exp_probs_b.bias")).is_some();
    let score = match keys.size("expert_gating_func")? {
        Some(1) => Score::Softmax,
        Some(2) => Score::Sigmoid,
        // Files without the key come from models of both kinds; only the logistic function has a correction.
        None if corrected => Score::Sigmoid,
        None => Score::Softmax,
        Some(other) => {
            return Err(ModelError::unsupported(keys.name("expert_gating_func"), other, "1, 2"));
        }
    };
    let normalized = match keys.file.boolean(&keys.name("expert_weights_norm"))? {
        Some(normalized) => normalized,
        None => architecture == Architecture::Qwen3Moe || corrected,
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
        biased: false,
        form: ExpertForm::Separate,
    })
}
