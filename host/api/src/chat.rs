//! Chat completions in OpenAI's shape.

use crate::{Usage, marker};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A whole chat completion.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChatCompletion {
    pub id: String,
    #[schema(inline)]
    pub object: marker::ChatCompletion,
    /// Time in seconds since 1970.
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
}

/// One choice of a chat completion.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChatChoice {
    pub index: u32,
    pub message: AssistantMessage,
    /// `stop`, `length` or `tool_calls`.
    pub finish_reason: String,
    #[schema(required)]
    pub logprobs: Option<ChatLogprobs>,
}

/// The message of a choice.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AssistantMessage {
    #[schema(inline)]
    pub role: marker::Assistant,
    /// `null` if the message consists only of calls.
    #[schema(required)]
    pub content: Option<String>,
    /// The model's reasoning before its answer, if the model reports it separately.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning_content: Option<String>,
    /// The same as `reasoning_content`, for clients that look here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<FunctionToolCall>,
}

/// A call of a tool.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FunctionToolCall {
    pub id: String,
    #[serde(rename = "type")]
    #[schema(inline)]
    pub kind: marker::Function,
    pub function: FunctionCall,
}

/// The tool of a call and its arguments.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct FunctionCall {
    pub name: String,
    /// JSON as text.
    pub arguments: String,
}

/// Log-probabilities of the tokens of a choice.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChatLogprobs {
    pub content: Vec<TokenLogprob>,
}

/// The log-probability of a token, beside those of the most likely tokens.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TokenLogprob {
    #[serde(flatten)]
    pub token: LikelyToken,
    pub top_logprobs: Vec<LikelyToken>,
}

/// A token and its log-probability.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LikelyToken {
    pub token: String,
    pub logprob: f64,
    /// The bytes of the token, which may be only a part of a character.
    #[schema(value_type = Vec<u32>)]
    pub bytes: Vec<u8>,
}

/// A piece of a streamed chat completion. `data: [DONE]` follows the last one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChatChunk {
    pub id: String,
    #[schema(inline)]
    pub object: marker::ChatChunk,
    /// Time in seconds since 1970.
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChunkChoice>,
    /// Only the last chunk has it, if the request has `stream_options.include_usage`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub usage: Option<Usage>,
}

/// A piece of one choice.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChunkChoice {
    pub index: u32,
    pub delta: ChatDelta,
    /// `stop`, `length` or `tool_calls` in the last piece of the choice.
    #[schema(required)]
    pub finish_reason: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub logprobs: Option<ChatLogprobs>,
}

/// The part of a message that a chunk adds.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
pub struct ChatDelta {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    pub role: Option<marker::Assistant>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub content: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning_content: Option<String>,
    /// The same as `reasoning_content`, for clients that look here.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning: Option<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ChunkToolCall>,
}

/// A part of a call. The first part has the id and the name, and the others continue the arguments.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChunkToolCall {
    pub index: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub id: Option<String>,
    #[serde(rename = "type", default, skip_serializing_if = "Option::is_none")]
    #[schema(inline, nullable = false)]
    pub kind: Option<marker::Function>,
    pub function: ChunkFunction,
}

/// A part of the function of a call.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ChunkFunction {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub name: Option<String>,
    pub arguments: String,
}
