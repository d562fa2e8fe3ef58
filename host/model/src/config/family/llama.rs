//! Llama.

use super::{Family, Gguf, GgufWindows, HuggingFace};
use crate::config::{Architecture, RopePairing};

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Llama,
    title: "Llama",
    model_types: &["llama"],
    class_name: "LlamaForCausalLM",
    gguf_names: &["llama"],
    huggingface: HuggingFace { mlp_bias: true, ..HuggingFace::DENSE },
    gguf: Gguf {
        // The rows of queries and keys are permuted for this pairing.
        pairing: RopePairing::Interleaved,
        windows: GgufWindows::Family(Architecture::Mistral),
        with_experts: Some(Architecture::Mixtral),
        ..Gguf::DENSE
    },
};
