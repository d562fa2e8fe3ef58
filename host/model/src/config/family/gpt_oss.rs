//! gpt-oss: attention with sinks, every second layer with a window, and experts with biases and clamped gates.

use super::layers::{layers, refuse, softmax};
use super::{Family, Gguf, GgufWindows, HuggingFace, Presence, Windows};
use crate::config::coding::WeightCoding;
use crate::config::gguf_style::{self, UsualExperts};
use crate::config::huggingface::Keys;
use crate::config::{Architecture, ExpertForm, Experts, GateKind, LayerStyle, Routing, Score, gguf};
use crate::error::ModelError;

/// The limit of the gates, which no key of GGUF files states.
const CLAMP: f32 = 7.0;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::GptOss,
    title: "gpt-oss",
    model_types: &["gpt_oss"],
    class_name: "GptOssForCausalLM",
    gguf_names: &["gpt-oss"],
    huggingface: HuggingFace {
        style,
        biases: [Presence::Configured(true); 2],
        windows: Windows::EverySecond,
        ..HuggingFace::DENSE
    },
    gguf: Gguf { style: style_in_gguf, windows: GgufWindows::Runs(2), rounds_yarn: false, ..Gguf::DENSE },
};

fn style(keys: &Keys<'_>, layer_count: usize, _hidden_size: usize) -> Result<LayerStyle, ModelError> {
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
        gate: GateKind::Clamped(keys.float("swiglu_limit")?.unwrap_or(CLAMP)),
        ..LayerStyle::default()
    })
}

fn style_in_gguf(
    keys: &gguf::Keys<'_>,
    layer_count: usize,
    _hidden_size: usize,
) -> Result<LayerStyle, ModelError> {
    let usual = UsualExperts { softmax_of_chosen: true, ..UsualExperts::default() };
    Ok(LayerStyle {
        experts: Some(gguf_style::experts(keys, layer_count, usual)?),
        sinks: true,
        gate: GateKind::Clamped(CLAMP),
        ..LayerStyle::default()
    })
}
