//! Gemma 3: four norms for each layer, scaled embeddings, and runs of layers with windows that have a rotation of their own.

use super::layers::refuse;
use super::{Family, Gguf, GgufWindows, HuggingFace, Presence, Windows};
use crate::config::huggingface::{Keys, brief};
use crate::config::{Architecture, GateKind, LayerStyle, Norms, Rope, RopePairing, RopeScaling, gguf};
use crate::error::ModelError;

/// Length of a run of layers, of which the last has no window.
const RUN: usize = 6;
/// Base of the rotation of layers with a window, and of the others.
const WINDOWED_THETA: f32 = 10_000.0;
const THETA: f32 = 1e6;
/// Number of layers of the largest model.
const LARGEST: usize = 62;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Gemma3,
    title: "Gemma 3 (text)",
    model_types: &["gemma3_text"],
    class_name: "Gemma3ForCausalLM",
    gguf_names: &["gemma3"],
    huggingface: HuggingFace {
        style,
        head_norms: Presence::Always,
        windows: Windows::Runs(RUN),
        theta: THETA,
        usual_sizes: &[
            ("num_attention_heads", 8),
            ("num_key_value_heads", 4),
            ("head_dim", 256),
            ("vocab_size", 262_208),
            ("max_position_embeddings", 131_072),
            ("sliding_window", 4096),
        ],
        ..HuggingFace::DENSE
    },
    gguf: Gguf { style: style_in_gguf, windows: GgufWindows::Runs(RUN), ..Gguf::DENSE },
};

fn style(keys: &Keys<'_>, _layer_count: usize, hidden_size: usize) -> Result<LayerStyle, ModelError> {
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
    // Files hold the weights of norms without their 1.
    Ok(layers(Norms::BeforeAndAfterPlusOne, scalar, theta, hidden_size))
}

fn style_in_gguf(
    keys: &gguf::Keys<'_>,
    layer_count: usize,
    hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    for key in ["attn_logit_softcapping", "final_logit_softcapping"] {
        if let Some(value) = keys.float(key)?.filter(|value| *value != 0.0) {
            return Err(ModelError::unsupported(keys.name(key), value, "0"));
        }
    }
    // Scores are scaled by the head size. Only the largest model, which no key marks, divides by that of its hidden rows.
    let heads = keys.required("attention.head_count")?.max(1);
    let scalar = match (layer_count, keys.size("attention.key_length")?) {
        (LARGEST, _) | (_, None) => hidden_size as f32 / heads as f32,
        (_, Some(size)) => size as f32,
    };
    let theta = keys.float("rope.freq_base_swa")?.map(|theta| theta as f32);
    Ok(layers(Norms::BeforeAndAfter, scalar, theta, hidden_size))
}

fn layers(norms: Norms, scalar: f32, theta: Option<f32>, hidden_size: usize) -> LayerStyle {
    LayerStyle {
        gate: GateKind::GeluTanh,
        norms,
        attention_scale: Some(1.0 / scalar.sqrt()),
        embedding_scale: Some((hidden_size as f32).sqrt()),
        windowed_rope: Some(Rope {
            theta: theta.unwrap_or(WINDOWED_THETA),
            pairing: RopePairing::Halves,
            scaling: RopeScaling::None,
        }),
        ..LayerStyle::default()
    }
}
