//! DeepSeek-V3 and Kimi K2: latent attention, and experts that are chosen by the logistic function of their scores and a bias.

use super::layers::{layer_types, layers, refuse};
use super::{Family, Gguf, HuggingFace};
use crate::config::gguf_style::{self, UsualExperts};
use crate::config::huggingface::Keys;
use crate::config::rope::yarn_magnitude;
use crate::config::{
    Architecture, Expansion, ExpertForm, Experts, Latent, LayerStyle, RopePairing, Routing, Score, gguf,
};
use crate::error::ModelError;

/// Epsilon of the norms inside latent attention, which no key states.
const LATENT_EPSILON: f32 = 1e-6;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::DeepSeekV3,
    title: "DeepSeek-V3, Kimi K2 and K2.5 (text)",
    model_types: &["deepseek_v3", "kimi_k2"],
    class_name: "DeepseekV3ForCausalLM",
    gguf_names: &["deepseek2"],
    huggingface: HuggingFace { style, ..HuggingFace::DENSE },
    gguf: Gguf { style: style_in_gguf, pairing: RopePairing::Interleaved, ..Gguf::DENSE },
};

/// Describes latent attention, and experts that are chosen by scores with a bias.
pub(super) fn style(
    keys: &Keys<'_>,
    layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    for (key, supported) in [("attention_bias", false), ("rope_interleave", true)] {
        if let Some(value) = keys.boolean(key)?.filter(|value| *value != supported) {
            return Err(ModelError::unsupported(key, value, supported.to_string()));
        }
    }
    let latent = Latent {
        query_rank: keys.size("q_lora_rank")?,
        rank: keys.required("kv_lora_rank")?,
        unrotated: keys.required("qk_nope_head_dim")?,
        rotated: keys.required("qk_rope_head_dim")?,
        value: keys.required("v_head_dim")?,
        norm_epsilon: LATENT_EPSILON,
        expansion: Expansion::Joined,
    };
    let experts = experts(keys, layer_count)?;
    Ok(LayerStyle {
        latent: Some(latent),
        experts: Some(experts),
        attention_scale: latent_scale(keys, &latent)?,
        ..LayerStyle::default()
    })
}

/// Describes experts that are chosen by the logistic function of their scores and a bias.
pub(super) fn experts(keys: &Keys<'_>, layer_count: usize) -> Result<Experts, ModelError> {
    refuse(keys, "hidden_act", &["silu"])?;
    refuse(keys, "scoring_func", &["sigmoid"])?;
    refuse(keys, "topk_method", &["noaux_tc"])?;
    let first = keys.size("first_k_dense_replace")?.unwrap_or(0);
    let step = keys.size("moe_layer_freq")?.unwrap_or(1).max(1);
    let listed = layer_types(keys, "mlp_layer_types", ["dense", "sparse"])?;
    let sparse = |layer: usize| match &listed {
        Some(listed) => listed.get(layer) == Some(&true),
        None => layer >= first && layer.is_multiple_of(step),
    };
    let size = keys.required("moe_intermediate_size")?;
    Ok(Experts {
        count: keys.required("n_routed_experts")?,
        used: keys.required("num_experts_per_tok")?,
        size,
        shared_size: keys.size("n_shared_experts")?.unwrap_or(0).saturating_mul(size),
        layers: match listed {
            Some(ref listed) => listed.clone(),
            None => layers(layer_count, sparse),
        },
        routing: Routing {
            score: Score::Sigmoid,
            groups: keys.size("n_group")?.unwrap_or(1),
            used_groups: keys.size("topk_group")?.unwrap_or(1),
            corrected: true,
            normalized: keys.boolean("norm_topk_prob")?.unwrap_or(true),
            scale: keys.float("routed_scaling_factor")?.unwrap_or(1.0),
        },
        biased: false,
        form: ExpertForm::Separate,
    })
}

/// Returns the factor of the scores: YaRN raises it by the square of its magnitude over all dimensions.
fn latent_scale(keys: &Keys<'_>, latent: &Latent) -> Result<Option<f32>, ModelError> {
    let parameters = keys.rope_parameters()?;
    let plain = 1.0 / (latent.head_size().max(1) as f64).sqrt();
    let Some(parameters) = parameters.filter(|parameters| parameters.is_yarn()) else {
        return Ok(Some(plain as f32));
    };
    let all_dimensions = parameters.float("mscale_all_dim")?.unwrap_or(0.0);
    let magnitude = match all_dimensions == 0.0 {
        true => 1.0,
        false => yarn_magnitude(parameters.float("factor")?.unwrap_or(1.0), all_dimensions),
    };
    Ok(Some((plain * magnitude * magnitude) as f32))
}

fn style_in_gguf(
    keys: &gguf::Keys<'_>,
    layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    let latent = gguf_style::latent(keys)?;
    let attention_scale = Some(gguf_style::latent_scale(keys, &latent)?);
    let usual = UsualExperts { has_shared: true, ..UsualExperts::default() };
    let experts = Some(gguf_style::experts(keys, layer_count, usual)?);
    Ok(LayerStyle { latent: Some(latent), experts, attention_scale, ..LayerStyle::default() })
}
