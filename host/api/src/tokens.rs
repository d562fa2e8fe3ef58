//! The tokens of a text or of a chat.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The tokens of a text or of a chat.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Tokens {
    /// Number of tokens.
    pub count: u64,
    /// Number of tokens that prompt and answer may have together.
    pub max_model_len: u64,
    pub tokens: Vec<u32>,
    /// The text of each token, if it was asked for. Bytes that are not UTF-8 by themselves are shown as U+FFFD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub token_strs: Option<Vec<String>>,
}

/// Tokens whose text is requested.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Detokenize {
    /// Name of a model of this host; the default is the host's default model.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub model: Option<String>,
    pub tokens: Vec<u32>,
}

/// The text of tokens.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Detokenized {
    pub prompt: String,
}
