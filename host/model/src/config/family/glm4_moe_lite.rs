//! GLM-4.7-Flash: the layers of DeepSeek-V3, and its GGUF files.

use super::{Family, Gguf, HuggingFace, deepseek_v3};
use crate::config::Architecture;

pub(super) static FAMILY: Family = Family {
    architecture: Architecture::Glm4MoeLite,
    title: "GLM-4.7-Flash",
    model_types: &["glm4_moe_lite"],
    class_name: "Glm4MoeLiteForCausalLM",
    gguf_names: &["deepseek2"],
    huggingface: HuggingFace { style: deepseek_v3::style, ..HuggingFace::DENSE },
    // Files of the name are read as those of DeepSeek-V3.
    gguf: Gguf::DENSE,
};
