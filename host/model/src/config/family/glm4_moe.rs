//! GLM-4.5 and GLM-4.6: grouped attention that rotates a part of each head, and the experts of DeepSeek-V3.

use super::{Family, Gguf, HuggingFace, Presence, deepseek_v3};
use crate::config::gguf_style::{self, UsualExperts};
use crate::config::huggingface::Keys;
use crate::config::{Architecture, LayerStyle, gguf};
use crate::error::ModelError;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Glm4Moe,
    title: "GLM-4.5, GLM-4.6",
    model_types: &["glm4_moe"],
    class_name: "Glm4MoeForCausalLM",
    gguf_names: &["glm4moe"],
    huggingface: HuggingFace {
        style,
        biases: [Presence::Configured(false), Presence::Never],
        head_norms: Presence::Configured(false),
        rotates_parts: true,
        ..HuggingFace::DENSE
    },
    gguf: Gguf { style: style_in_gguf, ..Gguf::DENSE },
};

fn style(keys: &Keys<'_>, layer_count: usize, _hidden_size: usize) -> Result<LayerStyle, ModelError> {
    let inner = keys.rope_parameters()?.map(|rope| rope.float("partial_rotary_factor")).transpose()?;
    let factor = keys.float("partial_rotary_factor")?.or(inner.flatten()).unwrap_or(0.5);
    let head = keys.required("head_dim")?;
    if !(factor > 0.0 && factor <= 1.0) {
        let problem = format!("{factor} is not above 0 and at most 1");
        return Err(ModelError::config("partial_rotary_factor", problem));
    }
    Ok(LayerStyle {
        experts: Some(deepseek_v3::experts(keys, layer_count)?),
        rotated: Some((head as f32 * factor) as usize),
        ..LayerStyle::default()
    })
}

fn style_in_gguf(
    keys: &gguf::Keys<'_>,
    layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    let rotated = keys.size("rope.dimension_count")?;
    let usual = UsualExperts { has_shared: true, ..UsualExperts::default() };
    let experts = Some(gguf_style::experts(keys, layer_count, usual)?);
    Ok(LayerStyle { experts, rotated, ..LayerStyle::default() })
}
