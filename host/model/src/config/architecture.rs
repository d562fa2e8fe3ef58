//! The model families that the one transformer definition covers, with their names in both file formats.
//!
//! Invariant: a family that is not listed here is rejected by name. This module knows no sizes.

use crate::error::ModelError;

/// A model family. The flags of [`super::ModelConfig`] describe the differences between families.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Architecture {
    Llama,
    Qwen2,
    Qwen3,
    Mistral,
}

impl Architecture {
    /// Tells whether models of this name, in either file format, are read.
    pub fn is_read(name: &str) -> bool {
        Self::from_gguf(name).is_ok() || Self::from_model_type(name).is_ok()
    }

    /// Parses `model_type` of config.json.
    pub(crate) fn from_model_type(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            "mistral" => Ok(Self::Mistral),
            other => Err(ModelError::unsupported(
                "model_type",
                format!("\"{other}\""),
                "llama, qwen2, qwen3, mistral",
            )),
        }
    }

    /// Parses `general.architecture` of a GGUF file, in which Mistral models are called llama.
    pub(crate) fn from_gguf(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            other => Err(ModelError::unsupported(
                "general.architecture",
                format!("\"{other}\""),
                "llama, qwen2, qwen3",
            )),
        }
    }

    /// Returns the class name that config.json lists under `architectures`.
    pub(crate) fn class_name(self) -> &'static str {
        match self {
            Self::Llama => "LlamaForCausalLM",
            Self::Qwen2 => "Qwen2ForCausalLM",
            Self::Qwen3 => "Qwen3ForCausalLM",
            Self::Mistral => "MistralForCausalLM",
        }
    }
}
