//! The model families that the one transformer definition covers, a file for each: its names in both file formats, and how its
//! layers are read from them.
//!
//! Invariant: a family that is not listed here is rejected by name. The readers of both formats ask the family; they have no
//! branch for one.

mod deepseek_v3;
mod gemma3;
mod glm4_moe;
mod glm4_moe_lite;
mod gpt_oss;
mod layers;
mod llama;
mod mistral;
mod mixtral;
mod qwen2;
mod qwen3;
mod qwen3_moe;

use super::{Architecture, LayerStyle, RopePairing, gguf, huggingface};
use crate::error::ModelError;

/// The families, in the order of the guide.
pub(super) static FAMILIES: [&Family; 11] = [
    &llama::FAMILY,
    &mistral::FAMILY,
    &qwen2::FAMILY,
    &qwen3::FAMILY,
    &gemma3::FAMILY,
    &qwen3_moe::FAMILY,
    &mixtral::FAMILY,
    &deepseek_v3::FAMILY,
    &glm4_moe::FAMILY,
    &glm4_moe_lite::FAMILY,
    &gpt_oss::FAMILY,
];

/// A model family.
pub(super) struct Family {
    pub(super) architecture: Architecture,
    /// Its name for people.
    pub(super) title: &'static str,
    /// Its names in `model_type` of config.json.
    pub(super) model_types: &'static [&'static str],
    /// Its class in `architectures` of config.json.
    pub(super) class_name: &'static str,
    /// Its names in `general.architecture` of GGUF files. A family without one has the files of another.
    pub(super) gguf_names: &'static [&'static str],
    pub(super) huggingface: HuggingFace,
    pub(super) gguf: Gguf,
}

/// How a family is read from config.json.
pub(super) struct HuggingFace {
    /// Reads the style of the layers, of which there are as many as the first number says; the second is the hidden width.
    pub(super) style: fn(&huggingface::Keys<'_>, usize, usize) -> Result<LayerStyle, ModelError>,
    /// Whether there are biases behind queries, keys and values, and behind the output of attention; `attention_bias` is the key.
    pub(super) biases: [Presence; 2],
    /// Whether the key `mlp_bias` counts.
    pub(super) mlp_bias: bool,
    /// Whether the heads of queries and keys have norms; `use_qk_norm` is the key.
    pub(super) head_norms: Presence,
    pub(super) windows: Windows,
    /// Whether a part of each head may rotate, which the style reads.
    pub(super) rotates_parts: bool,
    /// Base of the rotation of a model whose configuration leaves it out.
    pub(super) theta: f32,
    /// The sizes that published configurations leave out, because the class of the model sets them.
    pub(super) usual_sizes: &'static [(&'static str, usize)],
}

/// Whether layers have a part.
#[derive(Clone, Copy)]
pub(super) enum Presence {
    Never,
    Always,
    /// A key decides, and this is the meaning of its absence.
    Configured(bool),
}

/// The layers with a window, where `layer_types` does not list them.
#[derive(Clone, Copy)]
pub(super) enum Windows {
    Never,
    Always,
    /// Those from `max_window_layers` on, if `use_sliding_window` says so.
    Optional,
    /// All but the last of each run of layers. A key may set the length of a run, and this is the usual one.
    Runs(usize),
    /// Every second one, from the first on.
    EverySecond,
}

/// How a family is read from GGUF files.
pub(super) struct Gguf {
    /// Reads the style of the layers, of which there are as many as the first number says; the second is the hidden width.
    pub(super) style: fn(&gguf::Keys<'_>, usize, usize) -> Result<LayerStyle, ModelError>,
    pub(super) pairing: RopePairing,
    pub(super) windows: GgufWindows,
    /// Whether the bounds of YaRN's ramp are rounded to whole pairs.
    pub(super) rounds_yarn: bool,
    /// The family of files that have experts.
    pub(super) with_experts: Option<Architecture>,
}

/// The layers with a window, if a file has one.
#[derive(Clone, Copy)]
pub(super) enum GgufWindows {
    Refused,
    Always,
    /// All, and the file is one of this family.
    Family(Architecture),
    /// All but the last of each run of layers. A key may set the length of a run, and this is the usual one.
    Runs(usize),
}

impl Architecture {
    /// Returns the description of the family.
    pub(super) fn family(self) -> &'static Family {
        let found = FAMILIES.into_iter().find(|family| family.architecture == self);
        found.expect("the list of families has every architecture")
    }
}

impl HuggingFace {
    /// The dense layers of Llama, without windows.
    const DENSE: HuggingFace = HuggingFace {
        style: layers::dense,
        biases: [Presence::Configured(false); 2],
        mlp_bias: false,
        head_norms: Presence::Never,
        windows: Windows::Never,
        rotates_parts: false,
        theta: 10_000.0,
        usual_sizes: &[],
    };
}

impl Gguf {
    /// The dense layers of Llama in the order of Hugging Face, without windows.
    const DENSE: Gguf = Gguf {
        style: layers::dense_in_gguf,
        pairing: RopePairing::Halves,
        windows: GgufWindows::Refused,
        rounds_yarn: true,
        with_experts: None,
    };
}

impl Presence {
    /// Returns whether the part is there, from the value of its key.
    pub(super) fn with(self, configured: Option<bool>) -> bool {
        match self {
            Presence::Never => false,
            Presence::Always => true,
            Presence::Configured(usual) => configured.unwrap_or(usual),
        }
    }
}

/// Returns the size that a key has in models of this `model_type` whose configuration leaves it out.
pub(crate) fn usual_size(model_type: &str, key: &str) -> Option<usize> {
    let family = FAMILIES.into_iter().find(|family| family.model_types.contains(&model_type))?;
    let sizes = family.huggingface.usual_sizes;
    sizes.iter().find(|(name, _)| *name == key).map(|(_, size)| *size)
}
