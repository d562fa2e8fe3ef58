//! The families of mixtures, and the dense models whose layers they have apart from the experts.
//!
//! Invariant: a dense model gets a family whose attention and norms are its own, or an error that says what no family has.

use crate::config::{Architecture, ExpertForm, LayerStyle, ModelConfig};
use crate::error::ModelError;

/// A family of mixtures with grouped attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    /// The layers of Llama and Mistral.
    Mixtral,
    /// Layers with norms of query and key heads, as those of Qwen3.
    Qwen3Moe,
    /// Layers with biases of queries, keys and values, as those of Qwen2; norms of heads are optional.
    Glm4Moe,
}

impl Family {
    /// Returns the family whose layers those of a dense model become.
    pub(super) fn of(config: &ModelConfig) -> Result<Self, ModelError> {
        let refuse = |why: &str| {
            let problem = format!(
                "{:?} cannot be cut into experts: {why}; dense models of the families Llama, Mistral, Qwen2 and Qwen3 can",
                config.architecture
            );
            Err(super::refused("model", problem))
        };
        if config.style.experts.is_some() {
            return refuse("it has experts already");
        }
        if config.style != LayerStyle::default() {
            return refuse("no family with experts has its attention, norms, gates and scales");
        }
        if config.mlp_bias || config.output_bias {
            return refuse("no family with experts has biases behind attention and in feed-forward blocks");
        }
        let has_window = config.windows.iter().any(Option::is_some);
        match (config.qkv_bias, config.qk_norm) {
            (true, _) if has_window => {
                refuse("no family with experts has both windows and biases of queries, keys and values")
            }
            (true, _) => Ok(Family::Glm4Moe),
            (false, true) => Ok(Family::Qwen3Moe),
            (false, false) => Ok(Family::Mixtral),
        }
    }

    pub(super) fn architecture(self) -> Architecture {
        match self {
            Family::Mixtral => Architecture::Mixtral,
            Family::Qwen3Moe => Architecture::Qwen3Moe,
            Family::Glm4Moe => Architecture::Glm4Moe,
        }
    }

    /// Returns `model_type` of config.json.
    pub(super) fn model_type(self) -> &'static str {
        match self {
            Family::Mixtral => "mixtral",
            Family::Qwen3Moe => "qwen3_moe",
            Family::Glm4Moe => "glm4_moe",
        }
    }

    /// Returns `general.architecture` of GGUF files.
    pub(super) fn gguf_name(self) -> &'static str {
        match self {
            Family::Mixtral => "llama",
            Family::Qwen3Moe => "qwen3moe",
            Family::Glm4Moe => "glm4moe",
        }
    }

    /// Returns whether GGUF files have the rows of rotated heads in the order of interleaved pairs.
    pub(super) fn is_interleaved_in_gguf(self) -> bool {
        self == Family::Mixtral
    }

    /// Returns the names of the experts' weights in safetensors.
    pub(super) fn form(self) -> ExpertForm {
        match self {
            Family::Mixtral => ExpertForm::Mixtral,
            Family::Qwen3Moe | Family::Glm4Moe => ExpertForm::Separate,
        }
    }

    /// Returns whether the configuration has a factor for the weights of experts. Such a family chooses experts with a
    /// correction, too.
    pub(super) fn has_factor(self) -> bool {
        self == Family::Glm4Moe
    }
}
