//! The names of the model families that the one transformer definition covers, in both file formats.
//!
//! Invariant: a name of no family is an error that lists the known ones. This module knows no sizes.

use super::family::FAMILIES;
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

impl Architecture {
    /// Returns whether models of this name, in either file format, are read.
    pub fn is_read(name: &str) -> bool {
        Self::from_gguf(name).is_ok() || Self::from_model_type(name).is_ok()
    }

    /// Returns the name of the family for people.
    pub fn title(self) -> &'static str {
        self.family().title
    }

    /// Parses `model_type` of config.json.
    pub(crate) fn from_model_type(name: &str) -> Result<Self, ModelError> {
        let found = FAMILIES.iter().find(|family| family.model_types.contains(&name));
        found.map(|family| family.architecture).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().flat_map(|family| family.model_types).copied().collect();
            ModelError::unsupported("model_type", format!("\"{name}\""), known.join(", "))
        })
    }

    /// Parses `general.architecture` of a GGUF file, in which Mistral and Mixtral models are called llama, and GLM-4.7-Flash
    /// deepseek2.
    pub(crate) fn from_gguf(name: &str) -> Result<Self, ModelError> {
        let found = FAMILIES.iter().find(|family| family.gguf_names.contains(&name));
        found.map(|family| family.architecture).ok_or_else(|| {
            let mut known: Vec<&str> =
                FAMILIES.iter().flat_map(|family| family.gguf_names).copied().collect();
            known.dedup();
            ModelError::unsupported("general.architecture", format!("\"{name}\""), known.join(", "))
        })
    }

    /// Returns the class name that config.json lists under `architectures`.
    pub(crate) fn class_name(self) -> &'static str {
        self.family().class_name
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
        for family in FAMILIES {
            // Files of Mistral models are those of llama with a window, and those of Mixtral models have experts.
            let names = if family.gguf_names.is_empty() { &["llama"] } else { family.gguf_names };
            text += &format!("| {} | {} | {} |\n", family.title, quoted(family.model_types), quoted(names));
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
        for family in FAMILIES {
            let found = |name: &str| Architecture::from_model_type(name).ok();
            assert!(family.model_types.iter().all(|name| found(name) == Some(family.architecture)));
            assert!(family.gguf_names.iter().all(|name| Architecture::from_gguf(name).is_ok()));
        }
    }

    #[test]
    fn every_architecture_is_a_family_of_the_list() {
        let all = [
            Architecture::Llama,
            Architecture::Qwen2,
            Architecture::Qwen3,
            Architecture::Mistral,
            Architecture::Qwen3Moe,
            Architecture::Mixtral,
            Architecture::DeepSeekV3,
            Architecture::Glm4Moe,
            Architecture::Glm4MoeLite,
            Architecture::GptOss,
            Architecture::Gemma3,
        ];
        assert_eq!(all.len(), FAMILIES.len());
        for architecture in all {
            assert_eq!(architecture.family().architecture, architecture);
            assert!(!architecture.class_name().is_empty());
        }
    }
}
