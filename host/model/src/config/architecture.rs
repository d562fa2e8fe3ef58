//! The model families that the one transformer definition covers, with their names in both file formats.
//!
//! Invariant: a family that is not listed here is rejected by name. This module knows no sizes.

use crate::error::ModelError;

/// A model family. [`super::ModelConfig`] and its [`super::LayerStyle`] describe the differences between families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
    Qwen3Moe,
    Mixtral,
    /// DeepSeek-V3 and Kimi K2, whose layers are the same.
    DeepSeekV3,
    Glm4Moe,
    Glm4MoeLite,
    GptOss,
    Gemma3,
}

/// A family: its name for people, its names in `model_type` of config.json, its class there, and its names in
/// `general.architecture` of GGUF files.
type Row = (Architecture, &'static str, &'static [&'static str], &'static str, &'static [&'static str]);

const FAMILIES: [Row; 11] = [
    (Architecture::Llama, "Llama", &["llama"], "LlamaForCausalLM", &["llama"]),
    (Architecture::Mistral, "Mistral", &["mistral"], "MistralForCausalLM", &[]),
    (Architecture::Qwen2, "Qwen2, Qwen2.5", &["qwen2"], "Qwen2ForCausalLM", &["qwen2"]),
    (Architecture::Qwen3, "Qwen3", &["qwen3"], "Qwen3ForCausalLM", &["qwen3"]),
    (Architecture::Gemma3, "Gemma 3 (text)", &["gemma3_text"], "Gemma3ForCausalLM", &["gemma3"]),
    (Architecture::Qwen3Moe, "Qwen3-MoE", &["qwen3_moe"], "Qwen3MoeForCausalLM", &["qwen3moe"]),
    (Architecture::Mixtral, "Mixtral", &["mixtral"], "MixtralForCausalLM", &[]),
    (
        Architecture::DeepSeekV3,
        "DeepSeek-V3, Kimi K2 and K2.5 (text)",
        &["deepseek_v3", "kimi_k2"],
        "DeepseekV3ForCausalLM",
        &["deepseek2"],
    ),
    (Architecture::Glm4Moe, "GLM-4.5, GLM-4.6", &["glm4_moe"], "Glm4MoeForCausalLM", &["glm4moe"]),
    (
        Architecture::Glm4MoeLite,
        "GLM-4.7-Flash",
        &["glm4_moe_lite"],
        "Glm4MoeLiteForCausalLM",
        &["deepseek2"],
    ),
    (Architecture::GptOss, "gpt-oss", &["gpt_oss"], "GptOssForCausalLM", &["gpt-oss"]),
];

impl Architecture {
    /// Tells whether models of this name, in either file format, are read.
    pub fn is_read(name: &str) -> bool {
        Self::from_gguf(name).is_ok() || Self::from_model_type(name).is_ok()
    }

    /// Parses `model_type` of config.json.
    pub(crate) fn from_model_type(name: &str) -> Result<Self, ModelError> {
        let found = FAMILIES.iter().find(|(_, _, names, ..)| names.contains(&name));
        found.map(|(family, ..)| *family).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().flat_map(|(_, _, names, ..)| *names).copied().collect();
            ModelError::unsupported("model_type", format!("\"{name}\""), known.join(", "))
        })
    }

    /// Parses `general.architecture` of a GGUF file, in which Mistral and Mixtral models are called llama, and GLM-4.7-Flash
    /// deepseek2.
    pub(crate) fn from_gguf(name: &str) -> Result<Self, ModelError> {
        let found = FAMILIES.iter().find(|(.., names)| names.contains(&name));
        found.map(|(family, ..)| *family).ok_or_else(|| {
            let mut known: Vec<&str> = FAMILIES.iter().flat_map(|(.., names)| *names).copied().collect();
            known.dedup();
            ModelError::unsupported("general.architecture", format!("\"{name}\""), known.join(", "))
        })
    }

    /// Returns the class name that config.json lists under `architectures`.
    pub(crate) fn class_name(self) -> &'static str {
        let found = FAMILIES.iter().find(|(family, ..)| *family == self);
        found.map_or("", |(_, _, _, class, _)| class)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf;

    /// Returns the tables of the guide.
    fn tables() -> String {
        let quoted = |names: &[&str]| -> String {
            let names: Vec<String> = names.iter().map(|name| format!("`{name}`")).collect();
            if names.is_empty() { "–".to_owned() } else { names.join(", ") }
        };
        let mut text =
            "| Family | Safetensors (`model_type`) | GGUF (`general.architecture`) |\n|---|---|---|\n"
                .to_owned();
        for (family, name, types, _, architectures) in FAMILIES {
            // Files of Mistral models are those of llama with a window, and those of Mixtral models have experts.
            let is_llama = matches!(family, Architecture::Mistral | Architecture::Mixtral);
            let architectures = if is_llama { &["llama"] } else { architectures };
            text += &format!("| {name} | {} | {} |\n", quoted(types), quoted(architectures));
        }
        text += "\n| Weights | In memory |\n|---|---|\n";
        let formats: Vec<String> = gguf::formats().map(|format| format.to_string()).collect();
        text += &format!("| GGUF: {} | as they are |\n", formats.join(", "));
        for (coding, memory) in crate::config::CODINGS {
            text += &format!("| Safetensors: {coding} | {memory} |\n");
        }
        text
    }

    #[test]
    fn the_guide_lists_every_family_and_format() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../guide/models.md");
        let guide = std::fs::read_to_string(path).unwrap();
        let tables = tables();
        assert!(guide.contains(&tables), "host/guide/models.md must contain:\n\n{tables}");
    }

    #[test]
    fn every_family_is_found_by_each_of_its_names() {
        for (family, _, types, class, architectures) in FAMILIES {
            assert!(types.iter().all(|name| Architecture::from_model_type(name).is_ok_and(|f| f == family)));
            assert_eq!(family.class_name(), class);
            assert!(architectures.iter().all(|name| Architecture::from_gguf(name).is_ok()));
        }
    }
}
