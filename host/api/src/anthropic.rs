//! Messages in the shape of Anthropic's API.

use crate::marker;
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A message that a model generated.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AnthropicMessage {
    pub id: String,
    #[serde(rename = "type")]
    #[schema(inline)]
    pub kind: marker::Message,
    #[schema(inline)]
    pub role: marker::Assistant,
    pub content: Vec<AnthropicBlock>,
    pub model: String,
    /// `end_turn`, `max_tokens`, `stop_sequence` or `tool_use`; `null` while the message is generated.
    #[schema(required)]
    pub stop_reason: Option<String>,
    /// The stop sequence that ended the message.
    #[schema(required)]
    pub stop_sequence: Option<String>,
    pub usage: AnthropicUsage,
}

/// A block of a message's content.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AnthropicBlock {
    Text {
        text: String,
    },
    Thinking {
        thinking: String,
        /// It is always empty, because the host checks no signatures.
        signature: String,
    },
    ToolUse {
        id: String,
        name: String,
        /// The arguments, an object.
        input: Value,
    },
}

/// Token counts of a message. The tokens of the prompt are `input_tokens` and `cache_read_input_tokens` together.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct AnthropicUsage {
    /// Tokens of the prompt that were computed.
    pub input_tokens: u64,
    /// It is always 0: what is computed is cached without a charge.
    pub cache_creation_input_tokens: u64,
    /// Tokens of the prompt that were in the cache.
    pub cache_read_input_tokens: u64,
    pub output_tokens: u64,
}

/// The number of tokens of a request.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AnthropicTokenCount {
    pub input_tokens: u64,
}

/// An event of a streamed message.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AnthropicEvent {
    MessageStart {
        message: AnthropicMessage,
    },
    Ping,
    ContentBlockStart {
        index: u32,
        content_block: AnthropicBlock,
    },
    ContentBlockDelta {
        index: u32,
        delta: AnthropicDelta,
    },
    ContentBlockStop {
        index: u32,
    },
    MessageDelta {
        delta: AnthropicEnd,
        usage: AnthropicUsage,
    },
    MessageStop,
    /// The error that breaks the stream off.
    Error {
        error: AnthropicErrorDetail,
    },
}

impl AnthropicEvent {
    /// Returns the name of the event, which is also its `type`.
    pub fn name(&self) -> &'static str {
        match self {
            AnthropicEvent::MessageStart { .. } => "message_start",
            AnthropicEvent::Ping => "ping",
            AnthropicEvent::ContentBlockStart { .. } => "content_block_start",
            AnthropicEvent::ContentBlockDelta { .. } => "content_block_delta",
            AnthropicEvent::ContentBlockStop { .. } => "content_block_stop",
            AnthropicEvent::MessageDelta { .. } => "message_delta",
            AnthropicEvent::MessageStop => "message_stop",
            AnthropicEvent::Error { .. } => "error",
        }
    }
}

/// A piece of a block.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum AnthropicDelta {
    TextDelta {
        text: String,
    },
    ThinkingDelta {
        thinking: String,
    },
    SignatureDelta {
        signature: String,
    },
    /// A piece of the arguments, as text.
    InputJsonDelta {
        partial_json: String,
    },
}

/// The end of a streamed message.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AnthropicEnd {
    #[schema(required)]
    pub stop_reason: Option<String>,
    #[schema(required)]
    pub stop_sequence: Option<String>,
}

/// The body of an error on the routes of this API.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AnthropicError {
    #[serde(rename = "type")]
    #[schema(inline)]
    pub kind: marker::Error,
    pub error: AnthropicErrorDetail,
    /// The id of the request in the host's logs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub request_id: Option<String>,
}

/// An error in the terms of this API.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct AnthropicErrorDetail {
    /// The kind of the error, such as `invalid_request_error`.
    #[serde(rename = "type")]
    pub kind: String,
    pub message: String,
}
