//! Reads the messages of a chat, with their parts.

use super::image;
use crate::ApiError;
use serde::Deserialize;
use serde_json::Value;
use skep_engine::chat::{ChatMessage, Image, ToolCall};
use utoipa::ToSchema;

/// A message of a chat.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatMessage)]
pub(crate) struct MessageBody {
    /// `system`, `developer`, `user`, `assistant` or `tool`.
    role: String,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    tool_calls: Option<Vec<ToolCallBody>>,
    #[serde(default)]
    tool_call_id: Option<String>,
    /// The refusal that an assistant message had instead of content.
    #[serde(default)]
    refusal: Option<String>,
    #[serde(default)]
    #[schema(ignore)]
    audio: Option<Value>,
    #[serde(default)]
    #[schema(ignore)]
    function_call: Option<Value>,
    /// The reasoning before an assistant message. Models see it as far as their template shows it.
    #[serde(default)]
    reasoning_content: Option<String>,
    /// An alias of `reasoning_content`. Messages that come back from answers have both.
    #[serde(default)]
    reasoning: Option<String>,
}

/// A text, or parts of type `text` and, for models that see, `image_url`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatContent)]
#[serde(
    untagged,
    expecting = "the content must be a string or a list of parts such as {\"type\": \"text\", \"text\": …}"
)]
enum Content {
    Text(String),
    Parts(Vec<Value>),
}

/// A call that the model made.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatToolCall)]
struct ToolCallBody {
    id: String,
    function: FunctionCallBody,
}

/// The function of a call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatFunctionCall)]
struct FunctionCallBody {
    name: String,
    /// JSON as text.
    arguments: String,
}

/// Reads the messages of a request with this number of choices.
pub(crate) fn read_all(messages: &[MessageBody], choices: usize) -> Result<Vec<ChatMessage>, ApiError> {
    if messages.is_empty() {
        return Err(ApiError::parameter("messages", "messages is empty; send at least one message"));
    }
    let messages = messages.iter().enumerate().map(|(index, message)| message.read(index));
    let messages: Vec<ChatMessage> = messages.collect::<Result<_, _>>()?;
    image::check_all(&messages, choices)?;
    Ok(messages)
}

impl MessageBody {
    /// Returns the size of the texts and images, which is a measure of the work to read them.
    pub(crate) fn text_bytes(&self) -> usize {
        let parts = |parts: &[Value]| parts.iter().map(part_bytes).sum();
        let content = match &self.content {
            None => 0,
            Some(Content::Text(text)) => text.len(),
            Some(Content::Parts(list)) => parts(list),
        };
        let reasoning = self.reasoning().map_or(0, str::len);
        content
            + reasoning
            + self.tool_calls.iter().flatten().map(|call| call.function.arguments.len()).sum::<usize>()
    }

    /// Returns the reasoning before the message, from the first field that has any.
    fn reasoning(&self) -> Option<&str> {
        let fields = [&self.reasoning_content, &self.reasoning];
        fields.into_iter().flatten().map(String::as_str).find(|text| !text.is_empty())
    }

    /// Reads the message at this place in the request.
    fn read(&self, index: usize) -> Result<ChatMessage, ApiError> {
        let at = |field: &str| format!("messages[{index}].{field}");
        for (field, given) in [("audio", &self.audio), ("function_call", &self.function_call)] {
            if given.is_some() {
                return Err(ApiError::parameter(at(field), format!("{field} of a message is not supported")));
            }
        }
        let (content, images) = match &self.content {
            None => (self.refusal.clone().unwrap_or_default(), Vec::new()),
            Some(Content::Text(text)) => (text.clone(), Vec::new()),
            Some(Content::Parts(parts)) => read_parts(parts, &at("content"))?,
        };
        if let Some(Image { part, .. }) = images.first().filter(|_| self.role != "user") {
            let message = "only a message with the role user may have images";
            return Err(ApiError::parameter(at(&format!("content[{part}]")), message));
        }
        let message = match self.role.as_str() {
            "system" | "developer" => ChatMessage::system(content),
            "user" => ChatMessage::user(content),
            "assistant" => {
                let calls = self.tool_calls.iter().flatten().map(|call| ToolCall {
                    id: call.id.clone(),
                    name: call.function.name.clone(),
                    arguments: call.function.arguments.clone(),
                });
                let reasoning = self.reasoning().map(str::to_owned);
                ChatMessage { tool_calls: calls.collect(), reasoning, ..ChatMessage::assistant(content) }
            }
            "tool" => {
                let id = self.tool_call_id.as_deref();
                let id = id.ok_or_else(|| {
                    ApiError::parameter(
                        at("tool_call_id"),
                        "a message with the role tool must name the call that it answers",
                    )
                })?;
                ChatMessage::tool(id, content)
            }
            role => {
                let message = format!(
                    "{role:?} is not a role; the roles are system, developer, user, assistant and tool"
                );
                return Err(ApiError::parameter(at("role"), message));
            }
        };
        if content_is_missing(self) {
            return Err(ApiError::parameter(at("content"), "the content is missing"));
        }
        Ok(ChatMessage { images, name: self.name.clone(), ..message })
    }
}

/// Returns whether a message lacks content. Only an assistant message with tool calls or a refusal may omit it.
fn content_is_missing(message: &MessageBody) -> bool {
    let may_omit = message.role == "assistant" && (message.tool_calls.is_some() || message.refusal.is_some());
    message.content.is_none() && !may_omit
}

/// Returns the size of a part's text or image.
fn part_bytes(part: &Value) -> usize {
    let bytes = |value: &Value| value.as_str().map_or(0, str::len);
    bytes(&part["text"]) + bytes(&part["image_url"]["url"]) + bytes(&part["image_url"])
}

fn read_parts(parts: &[Value], at: &str) -> Result<(String, Vec<Image>), ApiError> {
    let (mut text, mut images) = (String::new(), Vec::new());
    for (index, part) in parts.iter().enumerate() {
        let invalid = |message: String| ApiError::parameter(format!("{at}[{index}]"), message);
        let said = part["text"].as_str().or_else(|| part["refusal"].as_str());
        match (part["type"].as_str(), said) {
            (Some("text" | "input_text" | "refusal"), Some(said)) => text.push_str(said),
            (Some("image_url"), _) => {
                images.push(image::read(&part["image_url"], text.len(), index).map_err(invalid)?);
            }
            (kind, _) => {
                let kind = kind.unwrap_or("?");
                return Err(invalid(format!(
                    "a part of type {kind:?} is not supported; send text or image_url"
                )));
            }
        }
    }
    Ok((text, images))
}
