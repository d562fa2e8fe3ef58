//! Messages: those that clients send to agents, and those that conversations consist of.

use crate::{FunctionToolCall, marker};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A message to an agent. It has `text`, `data`, or both.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
#[serde(deny_unknown_fields)]
pub struct SendMessage<J = Value> {
    #[serde(default)]
    pub text: String,
    /// Any JSON, which the agent gets as it was sent.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Value)]
    pub data: Option<J>,
}

/// A message of a conversation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    pub content: String,
    /// The reasoning before an assistant message, if its model reported it separately from its answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub reasoning: Option<String>,
    /// Calls that the model made. The field is missing if there are none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<FunctionToolCall>,
    /// The call that a message of the role `tool` answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub tool_call_id: Option<String>,
}

/// A message with its number in the conversation; the first one has number 1.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct NumberedMessage {
    #[serde(flatten)]
    pub message: Message,
    pub number: u64,
    /// Number of tokens in the content, reasoning and calls, if `tokens=true` asks for it and the conversation's
    /// model is loaded. The chat template's markup is not counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(nullable = false)]
    pub tokens: Option<u32>,
}

/// Messages of one conversation.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct MessagePage {
    #[schema(inline)]
    pub object: marker::List,
    pub data: Vec<NumberedMessage>,
    /// Number of messages in the whole conversation.
    pub total: u64,
    /// Whether the conversation continues after this page.
    pub has_more: bool,
}
