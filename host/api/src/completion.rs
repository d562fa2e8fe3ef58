//! Text completions in OpenAI's shape.

use crate::{Usage, marker};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use utoipa::ToSchema;

/// A text completion, or a piece of one. `data: [DONE]` follows the last piece of a stream.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Completion {
    pub id: String,
    #[schema(inline)]
    pub object: marker::TextCompletion,
    /// Time in seconds since 1970.
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    /// In a stream, only the last piece has it, if the request has `stream_options.include_usage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub usage: Option<Usage>,
}

/// One choice of a text completion.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct CompletionChoice {
    pub index: u32,
    pub text: String,
    #[schema(required)]
    pub logprobs: Option<CompletionLogprobs>,
    /// `stop` or `length`; `null` while the choice continues.
    #[schema(required)]
    pub finish_reason: Option<String>,
}

/// Log-probabilities of the tokens of a choice; all lists have an entry for each token.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    /// `null` for a token without a predecessor and for one that a grammar forced.
    pub token_logprobs: Vec<Option<f64>>,
    /// The most likely tokens, by their text.
    #[schema(value_type = Vec<Option<BTreeMap<String, f64>>>)]
    pub top_logprobs: Vec<Option<Map<String, Value>>>,
    /// Position of the token in the text, in characters.
    pub text_offset: Vec<u64>,
}
