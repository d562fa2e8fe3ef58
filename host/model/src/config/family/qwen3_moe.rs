//! Qwen3-MoE: the attention of Qwen3, and experts that are chosen by the softmax of their scores.

use super::layers::{layer_list, layers, refuse, softmax};
use super::{Family, Gguf, HuggingFace, Presence, Windows};
use crate::config::gguf_style::{self, UsualExperts};
use crate::config::huggingface::Keys;
use crate::config::{Architecture, ExpertForm, Experts, LayerStyle, gguf};
use crate::error::ModelError;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Qwen3Moe,
    title: "Qwen3-MoE",
    model_types: &["qwen3_moe"],
    class_name: "Qwen3MoeForCausalLM",
    gguf_names: &["qwen3moe"],
    huggingface: HuggingFace {
        style,
        head_norms: Presence::Always,
        windows: Windows::Optional,
        ..HuggingFace::DENSE
    },
    gguf: Gguf { style: style_in_gguf, ..Gguf::DENSE },
};

fn style(keys: &Keys<'_>, layer_count: usize, _hidden_size: usize) -> Result<LayerStyle, ModelError> {
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

fn style_in_gguf(
    keys: &gguf::Keys<'_>,
    layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    let usual = UsualExperts { normalized: true, ..UsualExperts::default() };
    let experts = gguf_style::experts(keys, layer_count, usual)?;
    Ok(LayerStyle { experts: Some(experts), ..LayerStyle::default() })
}
