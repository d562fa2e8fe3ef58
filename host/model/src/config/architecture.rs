//! The model families that the one transformer definition covers, with their names in both file formats.
//!
//! Invariant: a family that is not listed here is rejected by name. This module knows no sizes.

use crate::error::ModelError;

/// The values of `model_type` that are read.
const MODEL_TYPES: &str = "llama, qwen2, qwen3, mistral, qwen3_moe, mixtral, deepseek_v3, kimi_k2, glm4_moe_lite, gpt_oss, gemma3_text";

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
    Glm4MoeLite,
    GptOss,
    Gemma3,
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
            "qwen3_moe" => Ok(Self::Qwen3Moe),
            "mixtral" => Ok(Self::Mixtral),
            "deepseek_v3" | "kimi_k2" => Ok(Self::DeepSeekV3),
            "glm4_moe_lite" => Ok(Self::Glm4MoeLite),
            "gpt_oss" => Ok(Self::GptOss),
            "gemma3_text" => Ok(Self::Gemma3),
            other => Err(ModelError::unsupported("model_type", format!("\"{other}\""), MODEL_TYPES)),
        }
    }

    /// Parses `general.architecture` of a GGUF file, in which Mistral models are called llama.
    pub(crate) fn from_gguf(name: &str) -> Result<Self, ModelError> {
        match name {
            "llama" => Ok(Self::Llama),
            "qwen2" => Ok(Self::Qwen2),
            "qwen3" => Ok(Self::Qwen3),
            "qwen3moe" => Ok(Self::Qwen3Moe),
            "deepseek2" => Ok(Self::DeepSeekV3),
            other => Err(ModelError::unsupported(
                "general.architecture",
                format!("\"{other}\""),
                "llama, qwen2, qwen3, qwen3moe, deepseek2",
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
            Self::Qwen3Moe => "Qwen3MoeForCausalLM",
            Self::Mixtral => "MixtralForCausalLM",
            Self::DeepSeekV3 => "DeepseekV3ForCausalLM",
            Self::Glm4MoeLite => "Glm4MoeLiteForCausalLM",
            Self::GptOss => "GptOssForCausalLM",
            Self::Gemma3 => "Gemma3ForCausalLM",
        }
    }
}
