//! Qwen3: the layers of Llama with norms of the heads of queries and keys.

use super::{Family, Gguf, HuggingFace, Presence, Windows};
use crate::config::Architecture;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Qwen3,
    title: "Qwen3",
    model_types: &["qwen3"],
    class_name: "Qwen3ForCausalLM",
    gguf_names: &["qwen3"],
    huggingface: HuggingFace {
        head_norms: Presence::Always,
        windows: Windows::Optional,
        ..HuggingFace::DENSE
    },
    gguf: Gguf::DENSE,
};
