//! Qwen2 and Qwen2.5: the layers of Llama with biases of queries, keys and values.

use super::{Family, Gguf, HuggingFace, Presence, Windows};
use crate::config::Architecture;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Qwen2,
    title: "Qwen2, Qwen2.5",
    model_types: &["qwen2"],
    class_name: "Qwen2ForCausalLM",
    gguf_names: &["qwen2"],
    huggingface: HuggingFace {
        biases: [Presence::Always, Presence::Never],
        windows: Windows::Optional,
        ..HuggingFace::DENSE
    },
    gguf: Gguf::DENSE,
};
