//! Mixtral: the attention of Mistral, and experts that are chosen by the softmax of their scores. Its GGUF files are those of Llama.

use super::layers::{layers, refuse, softmax};
use super::{Family, Gguf, GgufWindows, HuggingFace, Presence, Windows};
use crate::config::gguf_style::{self, UsualExperts};
use crate::config::huggingface::Keys;
use crate::config::{Architecture, ExpertForm, Experts, LayerStyle, RopePairing, gguf};
use crate::error::ModelError;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Mixtral,
    title: "Mixtral",
    model_types: &["mixtral"],
    class_name: "MixtralForCausalLM",
    gguf_names: &[],
    huggingface: HuggingFace {
        style,
        biases: [Presence::Never; 2],
        windows: Windows::Always,
        ..HuggingFace::DENSE
    },
    gguf: Gguf {
        style: style_in_gguf,
        pairing: RopePairing::Interleaved,
        windows: GgufWindows::Always,
        ..Gguf::DENSE
    },
};

fn style(keys: &Keys<'_>, layer_count: usize, _hidden_size: usize) -> Result<LayerStyle, ModelError> {
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

fn style_in_gguf(
    keys: &gguf::Keys<'_>,
    layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    let usual = UsualExperts { size_key: "feed_forward_length", normalized: true, ..UsualExperts::default() };
    let experts = gguf_style::experts(keys, layer_count, usual)?;
    Ok(LayerStyle { experts: Some(experts), ..LayerStyle::default() })
}
