//! Models, and agents that can be used as models.

use crate::marker;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A model, or an agent as `agent:NAME`.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Model {
    pub id: String,
    #[schema(inline)]
    pub object: marker::Model,
    /// Time in seconds since 1970.
    pub created: u64,
    /// `skep` for models, and `agent` for agents.
    pub owned_by: String,
    /// Maximum number of tokens; only models have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub context_length: Option<u64>,
    /// The agent's description; only agents have it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub description: Option<String>,
    /// State and defaults of the model on this host; agents do not have them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub skep: Option<ModelDetails>,
}

/// The state of a model, and what requests get that set nothing themselves.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ModelDetails {
    /// `unloaded`, `loading`, `loaded`, `unloading`, `failed`, or `remote` for a model of another server.
    pub state: String,
    /// The current step of a load, or why the last one failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub message: Option<String>,
    /// The finished part of the current step of a load, if its size is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub percent: Option<u8>,
    /// Whether requests without a model get this one.
    pub is_default: bool,
    /// Other names of the model.
    pub aliases: Vec<String>,
    /// The markup in which the model writes tool calls. It is known once the model has been loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub markup: Option<String>,
    /// `local` for a model of this host, `cluster` for one that other hosts of its cluster compute, and `upstream` for one of
    /// another server and for a route.
    #[serde(default)]
    pub location: String,
    /// The numbers of the hosts that compute the model, if they are other hosts of the cluster.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hosts: Vec<i64>,
    /// The format of the most bytes of the weights, such as `Q8_0` or `BF16`. It is known once the model has been loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub quantization: Option<String>,
    /// Maximum number of tokens of an answer; without it, the context bounds prompt and answer together.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub max_output: Option<u64>,
    #[serde(default)]
    pub capabilities: ModelCapabilities,
    /// Sampling parameters of requests that set none. They are known once the model has been loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub sampling: Option<SamplingDefaults>,
}

/// The abilities of a model. A request that needs one that it lacks is refused.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ModelCapabilities {
    /// Whether the model calls tools.
    pub tools: bool,
    /// Whether answers are held to a JSON Schema.
    pub json_schema: bool,
    /// Whether the model writes its reasoning apart from its answer. It is not known of other servers' models, and of one
    /// that is not loaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning: Option<bool>,
    /// Whether the model sees images.
    pub images: bool,
    /// Whether the host makes embeddings with the model.
    pub embeddings: bool,
    /// Whether the host knows the model's tokens: log-probabilities, prompts of token ids, and `/tokenize`.
    pub tokens: bool,
}

/// Sampling parameters of requests that set none.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct SamplingDefaults {
    pub temperature: f32,
    pub top_p: f32,
    /// 0 keeps all tokens.
    pub top_k: u32,
    pub min_p: f32,
    pub repetition_penalty: f32,
}

/// A change of a model while the host runs.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ChangeModel {
    /// Name or alias of the model.
    pub model: String,
    pub action: ModelAction,
    /// With `alias`: the name that is pointed at the model until the host stops.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub alias: Option<String>,
    /// Whether the answer comes only once the model is loaded or unloaded.
    #[serde(default)]
    pub wait: bool,
    /// With `unload`: the time in seconds that running requests and turns may continue; by default 30.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false, maximum = 86400)]
    pub drain_s: Option<u64>,
}

/// The change that is made.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum ModelAction {
    #[default]
    Load,
    Unload,
    Alias,
}

impl ModelAction {
    /// Returns the word of the API.
    pub fn as_str(self) -> &'static str {
        match self {
            ModelAction::Load => "load",
            ModelAction::Unload => "unload",
            ModelAction::Alias => "alias",
        }
    }
}
