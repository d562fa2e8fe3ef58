//! The families of models whose configurations the planner reads, and the keys and details in which they differ.
//!
//! Invariant: a family that is not listed here is rejected by name.

use crate::config::Keys;
use crate::error::ModelError;

/// The details of a family that no key of its configuration states.
#[derive(Clone, Copy, Debug)]
pub(super) struct Family {
    pub(super) name: &'static str,
    /// Whether `sliding_window` counts only where `use_sliding_window` says so.
    pub(super) window_is_optional: bool,
    pub(super) qkv_bias: Biases,
    pub(super) output_bias: Biases,
    pub(super) head_norms: HeadNorms,
    /// Number of norms of a layer.
    pub(super) layer_norms: u64,
    pub(super) experts: Experts,
    /// Parts that the family always has, by name.
    pub(super) parts: &'static [&'static str],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Biases {
    Never,
    Always,
    /// The key `attention_bias` decides.
    Configured,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeadNorms {
    Never,
    Always,
    /// The key `use_qk_norm` decides.
    Configured,
}

/// The names and keys of a family's experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Experts {
    Never,
    /// DeepSeek's keys: dense layers first, shared experts, a bias that corrects the routing.
    DeepSeek,
    /// Qwen's keys: `decoder_sparse_step`, `mlp_only_layers`.
    Qwen,
    Mixtral,
    GptOss,
    Llama4,
}

const DENSE: Family = Family {
    name: "",
    window_is_optional: false,
    qkv_bias: Biases::Configured,
    output_bias: Biases::Configured,
    head_norms: HeadNorms::Never,
    layer_norms: 2,
    experts: Experts::Never,
    parts: &[],
};

const FAMILIES: [Family; 16] = [
    Family { name: "llama", ..DENSE },
    Family { name: "mistral", qkv_bias: Biases::Never, output_bias: Biases::Never, ..DENSE },
    Family {
        name: "qwen2",
        window_is_optional: true,
        qkv_bias: Biases::Always,
        output_bias: Biases::Never,
        ..DENSE
    },
    Family { name: "qwen3", window_is_optional: true, head_norms: HeadNorms::Always, ..DENSE },
    Family {
        name: "qwen2_moe",
        window_is_optional: true,
        qkv_bias: Biases::Always,
        output_bias: Biases::Never,
        experts: Experts::Qwen,
        ..DENSE
    },
    Family {
        name: "qwen3_moe",
        window_is_optional: true,
        head_norms: HeadNorms::Always,
        experts: Experts::Qwen,
        ..DENSE
    },
    Family {
        name: "mixtral",
        qkv_bias: Biases::Never,
        output_bias: Biases::Never,
        experts: Experts::Mixtral,
        ..DENSE
    },
    Family { name: "deepseek_v2", experts: Experts::DeepSeek, ..DENSE },
    Family { name: "deepseek_v3", experts: Experts::DeepSeek, ..DENSE },
    Family { name: "kimi_k2", experts: Experts::DeepSeek, ..DENSE },
    Family { name: "kimi_k25", experts: Experts::DeepSeek, ..DENSE },
    Family {
        name: "glm4_moe",
        output_bias: Biases::Never,
        head_norms: HeadNorms::Configured,
        experts: Experts::DeepSeek,
        ..DENSE
    },
    Family { name: "glm4_moe_lite", experts: Experts::DeepSeek, ..DENSE },
    Family {
        name: "gpt_oss",
        qkv_bias: Biases::Always,
        output_bias: Biases::Always,
        experts: Experts::GptOss,
        parts: &["attention sinks", "clamped gates"],
        ..DENSE
    },
    Family {
        name: "gemma3_text",
        head_norms: HeadNorms::Always,
        layer_norms: 4,
        parts: &["norms after the sublayers", "GELU gates"],
        ..DENSE
    },
    Family { name: "llama4_text", experts: Experts::Llama4, parts: &["layers without rotation"], ..DENSE },
];

impl Family {
    /// Finds the family of the text part of a model.
    pub(super) fn find(model_type: &str) -> Result<&'static Family, ModelError> {
        let name = match model_type {
            "gemma3" => "gemma3_text",
            "llama4" => "llama4_text",
            other => other,
        };
        FAMILIES.iter().find(|family| family.name == name).ok_or_else(|| {
            let known: Vec<&str> = FAMILIES.iter().map(|family| family.name).collect();
            ModelError::unsupported("model_type", format!("\"{model_type}\""), known.join(", "))
        })
    }
}

impl Biases {
    pub(super) fn are_present(self, keys: &Keys<'_>) -> Result<bool, ModelError> {
        Ok(match self {
            Biases::Never => false,
            Biases::Always => true,
            Biases::Configured => keys.boolean("attention_bias")?.unwrap_or(false),
        })
    }
}

impl HeadNorms {
    pub(super) fn are_present(self, keys: &Keys<'_>) -> Result<bool, ModelError> {
        Ok(match self {
            HeadNorms::Never => false,
            HeadNorms::Always => true,
            HeadNorms::Configured => keys.boolean("use_qk_norm")?.unwrap_or(false),
        })
    }
}
