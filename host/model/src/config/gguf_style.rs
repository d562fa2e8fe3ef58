//! Reads the parts of layers that several families share from GGUF files: experts, latent attention, windows and YaRN.
//!
//! Invariant: a value that changes the arithmetic but is not implemented causes an error that names the key.

use super::RopeScaling;
use super::family::GgufWindows;
use super::gguf::{Keys, tensor};
use super::rope::yarn_magnitude;
use super::style::{Expansion, ExpertForm, Experts, Latent, Routing, Score};
use crate::error::ModelError;

/// Epsilon of the norms inside latent attention, which no key states.
const LATENT_EPSILON: f32 = 1e-6;
/// Writers multiply the weight of YaRN's magnitude by this.
const LOG_MULTIPLIER: f32 = 0.1;

/// How the experts of a family are read where keys leave it open.
#[derive(Clone, Copy)]
pub(super) struct UsualExperts {
    /// The key of the width of an expert in files without `expert_feed_forward_length`.
    pub(super) size_key: &'static str,
    /// Whether `expert_shared_count` counts.
    pub(super) has_shared: bool,
    /// Whether scores are those of the chosen experts alone, unless the key names the logistic function.
    pub(super) softmax_of_chosen: bool,
    /// Whether weights add up to 1 without a correction, too.
    pub(super) normalized: bool,
}

impl Default for UsualExperts {
    fn default() -> Self {
        UsualExperts {
            size_key: "expert_feed_forward_length",
            has_shared: false,
            softmax_of_chosen: false,
            normalized: false,
        }
    }
}

/// Returns the window of each layer.
pub(super) fn windows(
    keys: &Keys<'_>,
    rule: GgufWindows,
    layer_count: usize,
    window: Option<usize>,
) -> Result<Vec<Option<usize>>, ModelError> {
    let run = match rule {
        // Without the key, layers alternate as in the models of the family: the last of each run sees everything.
        GgufWindows::Runs(usual) => {
            Some(keys.size("attention.sliding_window_pattern")?.unwrap_or(usual).max(1))
        }
        GgufWindows::Refused | GgufWindows::Always | GgufWindows::Family(_) => None,
    };
    let has_window = |layer: usize| run.is_none_or(|run| !(layer + 1).is_multiple_of(run));
    // The length is bounded here because `check` reports the key only later.
    let layers = 0..layer_count.min(super::MAX_LAYERS);
    Ok(layers.map(|layer| window.filter(|_| has_window(layer))).collect())
}

/// Reads the sizes of latent attention.
pub(super) fn latent(keys: &Keys<'_>) -> Result<Latent, ModelError> {
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

/// Returns the factor of the scores of latent attention.
pub(super) fn latent_scale(keys: &Keys<'_>, latent: &Latent) -> Result<f32, ModelError> {
    let plain = 1.0 / (latent.head_size().max(1) as f64).sqrt();
    let all = keys.float("rope.scaling.yarn_log_multiplier")?.unwrap_or(0.0) as f32 / LOG_MULTIPLIER;
    let factor = keys.float("rope.scaling.factor")?.unwrap_or(1.0) as f32;
    let is_yarn = keys.file.string(&keys.name("rope.scaling.type"))? == Some("yarn");
    let magnitude = if is_yarn && all > 0.0 { yarn_magnitude(factor, all) } else { 1.0 };
    Ok((plain * magnitude * magnitude) as f32)
}

/// Returns YaRN's scaling of a GGUF model. With latent attention, cosines and sines are not scaled, because the magnitude of
/// all dimensions cancels theirs.
pub(super) fn yarn(
    keys: &Keys<'_>,
    truncated: bool,
    is_latent: bool,
    factor: f32,
) -> Result<RopeScaling, ModelError> {
    let number = |key: &str, usual: f32| -> Result<f32, ModelError> {
        Ok(keys.float(key)?.map_or(usual, |value| value as f32))
    };
    // The magnitude of all dimensions, which scales those that are not rotated, too.
    let all = match number("rope.scaling.yarn_log_multiplier", 0.0)? {
        0.0 => 1.0,
        multiplier => yarn_magnitude(factor, multiplier) as f32,
    };
    Ok(RopeScaling::Yarn {
        factor,
        beta_fast: number("rope.scaling.yarn_beta_fast", 32.0)?,
        beta_slow: number("rope.scaling.yarn_beta_slow", 1.0)?,
        original_context: keys.required("rope.scaling.original_context_length")?,
        truncated,
        magnitude: match is_latent {
            true => 1.0,
            false => yarn_magnitude(factor, 1.0) as f32 / all * number("rope.scaling.attn_factor", 1.0)?,
        },
    })
}

/// Reads the experts of a family.
pub(super) fn experts(
    keys: &Keys<'_>,
    layer_count: usize,
    usual: UsualExperts,
) -> Result<Experts, ModelError> {
    let size = match keys.size("expert_feed_forward_length")? {
        Some(size) => size,
        None => keys.required(usual.size_key)?,
    };
    let shared = match usual.has_shared {
        true => keys.size("expert_shared_count")?.unwrap_or(0),
        false => 0,
    };
    let first = keys.size("leading_dense_block_count")?.unwrap_or(0);
    let corrected = tensor(keys.file, &format!("blk.{first}.exp_probs_b.bias")).is_some();
    let score = match keys.size("expert_gating_func")? {
        None | Some(1 | 3) if usual.softmax_of_chosen => Score::SoftmaxOfChosen,
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
        None => usual.normalized || corrected,
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
