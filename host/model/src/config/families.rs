//! Reads the [`LayerStyle`] of each family from config.json.
//!
//! Invariant: a key that changes the arithmetic but is not implemented causes an error that names it.

use serde_json::Value;

use super::coding::WeightCoding;
use super::huggingface::{Keys, brief};
use super::rope::yarn_magnitude;
use super::style::{Expansion, ExpertForm, Experts, GateKind, Latent, LayerStyle, Norms, Routing, Score};
use super::{Architecture, Rope, RopePairing, RopeScaling};
use crate::error::ModelError;

/// Epsilon of the norms inside latent attention, which no key states.
const LATENT_EPSILON: f32 = 1e-6;

/// The sizes that published configurations leave out, because the class of the model sets them: `model_type`, then keys
/// with their values.
type UsualSizes = (&'static str, &'static [(&'static str, usize)]);

const USUAL_SIZES: &[UsualSizes] = &[(
    "gemma3_text",
    &[
        ("num_attention_heads", 8),
        ("num_key_value_heads", 4),
        ("head_dim", 256),
        ("vocab_size", 262_208),
        ("max_position_embeddings", 131_072),
        ("sliding_window", 4096),
    ],
)];
/// Base of the rotation of Gemma 3's layers without a window.
const GEMMA3_THETA: f32 = 1e6;

/// Returns the size that a key has in models of this `model_type` whose configuration leaves it out.
pub(crate) fn usual_size(model_type: &str, key: &str) -> Option<usize> {
    let (_, sizes) = USUAL_SIZES.iter().find(|(name, _)| *name == model_type)?;
    sizes.iter().find(|(name, _)| *name == key).map(|(_, size)| *size)
}

/// Returns the base of the rotation of a model whose configuration leaves it out.
pub(super) fn usual_theta(architecture: Architecture) -> f32 {
    if architecture == Architecture::Gemma3 { GEMMA3_THETA } else { 10_000.0 }
}

/// Returns the style of a family's layers.
pub(super) fn style(
    keys: &Keys<'_>,
    architecture: Architecture,
    layer_count: usize,
    hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    match architecture {
        Architecture::Llama | Architecture::Qwen2 | Architecture::Qwen3 | Architecture::Mistral => {
            refuse(keys, "hidden_act", &["silu", "swish"])?;
            Ok(LayerStyle::default())
        }
        Architecture::Qwen3Moe => qwen3_moe(keys, layer_count),
        Architecture::Mixtral => mixtral(keys, layer_count),
        Architecture::DeepSeekV3 | Architecture::Glm4MoeLite => deepseek(keys, layer_count),
        Architecture::Glm4Moe => glm4_moe(keys, layer_count),
        Architecture::GptOss => gpt_oss(keys, layer_count),
        Architecture::Gemma3 => gemma3(keys, hidden_size),
    }
}

fn qwen3_moe(keys: &Keys<'_>, layer_count: usize) -> Result<LayerStyle, ModelError> {
    refuse(keys, "hidden_act", &["silu"])?;
    let count = match keys.size("num_experts")? {
        Some(count) => count,
        None => keys.required("num_local_experts")?,
    };
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense = layer_list(keys, "mlp_only_layers")?;
    let sparse = |layer: usize| (layer + 1).is_multiple_of(step) && !dense.contains(&layer);
    let experts = Experts {
        count,
        used: keys.required("num_experts_per_tok")?,
        size: keys.required("moe_intermediate_size")?,
        shared_size: 0,
        layers: layers(layer_count, sparse),
        routing: softmax(keys.boolean("norm_topk_prob")?.unwrap_or(false)),
        biased: false,
        form: ExpertForm::Separate,
    };
    Ok(LayerStyle { experts: Some(experts), ..LayerStyle::default() })
}

fn mixtral(keys: &Keys<'_>, layer_count: usize) -> Result<LayerStyle, ModelError> {
    refuse(keys, "hidden_act", &["silu"])?;
    let experts = Experts {
        count: keys.required("num_local_experts")?,
        used: keys.required("num_experts_per_tok")?,
        size: keys.required("intermediate_size")?,
        shared_size: 0,
        layers: layers(layer_count, |_| true),
        routing: softmax(true),
        biased: false,
        form: ExpertForm::Mixtral,
    };
    Ok(LayerStyle { experts: Some(experts), ..LayerStyle::default() })
}

/// Describes latent attention, and experts that are chosen by scores with a bias.
fn deepseek(keys: &Keys<'_>, layer_count: usize) -> Result<LayerStyle, ModelError> {
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
    let experts = deepseek_experts(keys, layer_count)?;
    Ok(LayerStyle {
        latent: Some(latent),
        experts: Some(experts),
        attention_scale: latent_scale(keys, &latent)?,
        ..LayerStyle::default()
    })
}

/// Describes experts that are chosen by the logistic function of their scores and a bias.
fn deepseek_experts(keys: &Keys<'_>, layer_count: usize) -> Result<Experts, ModelError> {
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

/// Describes grouped attention that rotates a part of each head, and the experts of DeepSeek-V3.
fn glm4_moe(keys: &Keys<'_>, layer_count: usize) -> Result<LayerStyle, ModelError> {
    let inner = keys.rope_parameters()?.map(|rope| rope.float("partial_rotary_factor")).transpose()?;
    let factor = keys.float("partial_rotary_factor")?.or(inner.flatten()).unwrap_or(0.5);
    let head = keys.required("head_dim")?;
    if !(factor > 0.0 && factor <= 1.0) {
        let problem = format!("{factor} is not above 0 and at most 1");
        return Err(ModelError::config("partial_rotary_factor", problem));
    }
    Ok(LayerStyle {
        experts: Some(deepseek_experts(keys, layer_count)?),
        rotated: Some((head as f32 * factor) as usize),
        ..LayerStyle::default()
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

fn gpt_oss(keys: &Keys<'_>, layer_count: usize) -> Result<LayerStyle, ModelError> {
    refuse(keys, "hidden_act", &["silu"])?;
    if let Some(alpha) = keys.float("swiglu_alpha")?.filter(|alpha| *alpha != 1.702) {
        return Err(ModelError::unsupported("swiglu_alpha", alpha, "1.702"));
    }
    let experts = Experts {
        count: keys.required("num_local_experts")?,
        used: keys.required("num_experts_per_tok")?,
        size: keys.required("intermediate_size")?,
        shared_size: 0,
        layers: layers(layer_count, |_| true),
        routing: Routing { score: Score::SoftmaxOfChosen, ..softmax(false) },
        biased: true,
        form: match WeightCoding::read_from(keys)? {
            Some(WeightCoding::Mxfp4) => ExpertForm::InterleavedRows,
            _ => ExpertForm::Interleaved,
        },
    };
    Ok(LayerStyle {
        experts: Some(experts),
        sinks: true,
        gate: GateKind::Clamped(keys.float("swiglu_limit")?.unwrap_or(7.0)),
        ..LayerStyle::default()
    })
}

fn gemma3(keys: &Keys<'_>, hidden_size: usize) -> Result<LayerStyle, ModelError> {
    let name = if keys.get("hidden_activation").is_some() { "hidden_activation" } else { "hidden_act" };
    refuse(keys, name, &["gelu_pytorch_tanh"])?;
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = keys.get(key) {
            return Err(ModelError::unsupported(key, brief(value), "null"));
        }
    }
    if keys.boolean("use_bidirectional_attention")? == Some(true) {
        return Err(ModelError::unsupported("use_bidirectional_attention", true, "false"));
    }
    let theta = match keys.nested_rope("sliding_attention")? {
        Some(local) => local.float("rope_theta")?,
        None => keys.float("rope_local_base_freq")?,
    };
    let scalar = keys.float("query_pre_attn_scalar")?.unwrap_or(256.0);
    Ok(LayerStyle {
        gate: GateKind::GeluTanh,
        norms: Norms::BeforeAndAfterPlusOne,
        attention_scale: Some(1.0 / scalar.sqrt()),
        embedding_scale: Some((hidden_size as f32).sqrt()),
        windowed_rope: Some(Rope {
            theta: theta.unwrap_or(10000.0),
            pairing: RopePairing::Halves,
            scaling: RopeScaling::None,
        }),
        ..LayerStyle::default()
    })
}

fn softmax(normalized: bool) -> Routing {
    Routing { score: Score::Softmax, groups: 1, used_groups: 1, corrected: false, normalized, scale: 1.0 }
}

fn layers(count: usize, sparse: impl Fn(usize) -> bool) -> Vec<bool> {
    // The length is bounded here because `check` reports the key only later.
    (0..count.min(super::MAX_LAYERS)).map(sparse).collect()
}

fn layer_list(keys: &Keys<'_>, key: &str) -> Result<Vec<usize>, ModelError> {
    match keys.get(key) {
        None => Ok(Vec::new()),
        Some(Value::Array(layers)) => {
            let numbers = layers.iter().map(|layer| layer.as_u64().map(|layer| layer as usize));
            numbers
                .collect::<Option<_>>()
                .ok_or_else(|| ModelError::config(key, "is not a list of layer numbers"))
        }
        Some(value) => Err(ModelError::config(key, format!("{} is not a list", brief(value)))),
    }
}

/// Reads a list with one of two names for each layer. Returns whether each is the second.
fn layer_types(keys: &Keys<'_>, key: &str, names: [&str; 2]) -> Result<Option<Vec<bool>>, ModelError> {
    let Some(value) = keys.get(key) else { return Ok(None) };
    let types = value.as_array().map(Vec::as_slice).unwrap_or_default();
    types
        .iter()
        .take(super::MAX_LAYERS + 1)
        .map(|kind| match kind.as_str() {
            Some(name) if name == names[0] => Ok(false),
            Some(name) if name == names[1] => Ok(true),
            _ => Err(ModelError::unsupported(key, brief(kind), names.join(", "))),
        })
        .collect::<Result<Vec<_>, _>>()
        .map(Some)
}

fn refuse(keys: &Keys<'_>, key: &str, supported: &[&str]) -> Result<(), ModelError> {
    match keys.string(key)? {
        Some(value) if !supported.contains(&value) => {
            Err(ModelError::unsupported(key, format!("\"{value}\""), supported.join(", ")))
        }
        _ => Ok(()),
    }
}
