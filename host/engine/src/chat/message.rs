//! The messages of a conversation, and the tools that it may call.
//!
//! Invariant: a message knows nothing of any model's markup, except for `raw`. That is the text that a model
//! produced for it, kept so that the model sees it again exactly as it was.

use serde::{Deserialize, Serialize};
use serde_json::Value;
use uuid::Uuid;

use super::image::Image;

/// The speaker of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Role {
    /// Instructions of the developer, at the start of the conversation.
    System,
    /// A person, or the program that uses the model.
    User,
    /// The model.
    Assistant,
    /// The result of a call that the model made.
    Tool,
}

impl Role {
    /// Returns the name that chat templates and the APIs use.
    pub fn as_str(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::Tool => "tool",
        }
    }
}

/// One message of a conversation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatMessage {
    pub role: Role,
    pub content: String,
    /// The images of a user's message, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub images: Vec<Image>,
    /// The calls that an assistant message makes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool message answers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<String>,
    /// The name of the tool that answers, or of the speaker.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The reasoning before an assistant message, if the model reports it separately from its text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// An assistant message's text exactly as generated, tool-call markup included.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub raw: Option<String>,
}

impl ChatMessage {
    /// Creates a message with instructions.
    pub fn system(content: impl Into<String>) -> Self {
        Self::new(Role::System, content.into())
    }

    /// Creates a message of a person, without images.
    pub fn user(content: impl Into<String>) -> Self {
        Self::new(Role::User, content.into())
    }

    /// Creates a message of the model from its visible text, without calls, reasoning or `raw`.
    pub fn assistant(content: impl Into<String>) -> Self {
        Self::new(Role::Assistant, content.into())
    }

    /// Creates the answer to the tool call `call_id`.
    pub fn tool(call_id: impl Into<String>, content: impl Into<String>) -> Self {
        ChatMessage { tool_call_id: Some(call_id.into()), ..Self::new(Role::Tool, content.into()) }
    }

    /// Returns the number of bytes of the text, the reasoning, and the arguments of the tools that it calls.
    pub fn text_bytes(&self) -> usize {
        self.content_bytes() + self.reasoning.as_ref().map_or(0, String::len)
    }

    /// Returns the number of bytes of the text and of the arguments of the tools that it calls.
    pub(crate) fn content_bytes(&self) -> usize {
        let arguments: usize = self.tool_calls.iter().map(|call| call.arguments.len()).sum();
        self.content.len() + arguments
    }

    /// Returns the approximate size of the message, in memory and as JSON.
    pub fn bytes(&self) -> usize {
        const OWN: usize = 64;
        let text = |text: &Option<String>| text.as_deref().map_or(0, json_bytes);
        let arguments: usize = self.tool_calls.iter().map(|call| json_bytes(&call.arguments)).sum();
        let images: usize = self.images.iter().map(|image| image.source.bytes() + OWN).sum();
        let names: usize = self.tool_calls.iter().map(|call| call.id.len() + call.name.len() + OWN).sum();
        OWN + json_bytes(&self.content)
            + arguments
            + images
            + names
            + text(&self.tool_call_id)
            + text(&self.name)
            + text(&self.reasoning)
            + text(&self.raw)
    }

    fn new(role: Role, content: String) -> Self {
        ChatMessage {
            role,
            content,
            images: Vec::new(),
            tool_calls: Vec::new(),
            tool_call_id: None,
            name: None,
            reasoning: None,
            raw: None,
        }
    }
}

/// Returns the number of bytes that a text takes between the quotes of a JSON string.
pub(super) fn json_bytes(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' => 1,
        0..0x20 => 5,
        _ => 0,
    };
    text.len() + text.bytes().map(escaped).sum::<usize>()
}

/// A tool that the model may call.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ToolSpec {
    pub name: String,
    /// Says what the tool does and when to use it; the model reads this.
    pub description: String,
    /// JSON Schema of the arguments, an object.
    pub parameters: Value,
}

/// A call of a tool that the model wrote.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// Identifies the call in its conversation, so that the message with its result can name it.
    pub id: String,
    pub name: String,
    /// JSON, as the model wrote it.
    pub arguments: String,
}

impl ToolCall {
    /// Mints an id that no other call has, in this process or any other: models repeat themselves, but ids must
    /// be unique.
    pub fn mint_id() -> String {
        let mut random = Uuid::now_v7().simple().to_string();
        // The first digits of a version 7 id are its time in ms. The rest keeps the low 16 bits of the time and
        // all 74 random bits.
        random.drain(..8);
        format!("call_{random}")
    }

    /// Returns the arguments as an object. Another value becomes the object's only member.
    pub(super) fn arguments_object(&self) -> serde_json::Map<String, Value> {
        let text = self.arguments.trim();
        let value = match serde_json::from_str(text) {
            Ok(Value::String(inner)) => serde_json::from_str(&inner).unwrap_or(Value::String(inner)),
            Ok(value) => value,
            Err(_) if text.is_empty() => Value::Null,
            Err(_) => Value::String(text.to_owned()),
        };
        match value {
            Value::Object(members) => members,
            Value::Null => serde_json::Map::new(),
            other => serde_json::Map::from_iter([("arguments".to_owned(), other)]),
        }
    }
}

/// Whether the model calls a tool.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum ToolChoice {
    /// The model decides.
    #[default]
    Auto,
    /// The tools are described, but no call is made and none is looked for.
    None,
    /// The model makes at least one call.
    Required,
    /// The model calls this tool.
    Named(String),
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn call_ids_are_unique_and_have_one_format() {
        let ids: HashSet<String> = (0..10_000).map(|_| ToolCall::mint_id()).collect();
        assert_eq!(ids.len(), 10_000);
        assert!(
            ids.iter().all(|id| id.starts_with("call_") && id.len() == 5 + 24),
            "{:?}",
            ids.iter().next()
        );
    }

    #[test]
    fn message_survives_json() {
        let call = ToolCall { id: "call_1".into(), name: "f".into(), arguments: "{}".into() };
        let message = ChatMessage {
            tool_calls: vec![call],
            raw: Some("<tool_call>…".into()),
            ..ChatMessage::assistant("x")
        };
        let json = serde_json::to_string(&message).unwrap();
        assert_eq!(serde_json::from_str::<ChatMessage>(&json).unwrap(), message);
        assert!(!serde_json::to_string(&ChatMessage::user("hi")).unwrap().contains("null"));
    }
}
