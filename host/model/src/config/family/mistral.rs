//! Mistral: the layers of Llama with windows. Its GGUF files are those of Llama.

use super::{Family, Gguf, GgufWindows, HuggingFace, Presence, Windows};
use crate::config::{Architecture, RopePairing};

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Mistral,
    title: "Mistral",
    model_types: &["mistral"],
    class_name: "MistralForCausalLM",
    gguf_names: &[],
    huggingface: HuggingFace { biases: [Presence::Never; 2], windows: Windows::Always, ..HuggingFace::DENSE },
    gguf: Gguf { pairing: RopePairing::Interleaved, windows: GgufWindows::Always, ..Gguf::DENSE },
};
