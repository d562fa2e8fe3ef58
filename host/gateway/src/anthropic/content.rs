//! The messages of a request, and the blocks of which they consist.

use crate::{ApiError, openai::image};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_engine::chat::{ChatMessage, Image, ToolCall};
use utoipa::ToSchema;

/// A message of a conversation.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicTurn)]
pub(crate) struct Turn {
    /// `user` or `assistant`.
    role: String,
    content: Content,
}

/// A text, or blocks of type `text`, `image`, `thinking`, `tool_use` and `tool_result`.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = AnthropicContent)]
#[serde(
    untagged,
    expecting = "the content must be a string or a list of blocks such as {\"type\": \"text\", \"text\": …}"
)]
pub(crate) enum Content {
    Text(String),
    Blocks(Vec<Value>),
}

impl Content {
    /// Returns the text of content that may consist only of text.
    pub(crate) fn text(&self, at: &str) -> Result<String, ApiError> {
        match self {
            Content::Text(text) => Ok(text.clone()),
            Content::Blocks(blocks) => texts_of(blocks, at),
        }
    }

    pub(crate) fn bytes(&self) -> usize {
        match self {
            Content::Text(text) => text.len(),
            Content::Blocks(blocks) => blocks.iter().map(value_bytes).sum(),
        }
    }
}

impl Turn {
    pub(crate) fn bytes(&self) -> usize {
        self.content.bytes()
    }

    pub(crate) fn is_of_assistant(&self) -> bool {
        self.role == "assistant"
    }

    /// Appends the messages of this turn: results of tools come before what the user says beside them.
    pub(crate) fn read(&self, index: usize, messages: &mut Vec<ChatMessage>) -> Result<(), ApiError> {
        let at = format!("messages[{index}].content");
        match (self.role.as_str(), &self.content) {
            ("user", Content::Text(text)) => messages.push(ChatMessage::user(text.clone())),
            ("assistant", Content::Text(text)) => messages.push(ChatMessage::assistant(text.clone())),
            ("user", Content::Blocks(blocks)) => {
                let (mut text, mut images) = (String::new(), Vec::new());
                let mut speaks = false;
                for (part, (block, at)) in numbered(blocks, &at).enumerate() {
                    speaks |= kind(block) != "tool_result";
                    match kind(block) {
                        "text" => text.push_str(string(block, "text", &at)?),
                        "image" => images.push(picture(block, text.len(), part, &at)?),
                        "tool_result" => messages.push(tool_result(block, &at)?),
                        other => return Err(unsupported(other, &at)),
                    }
                }
                if speaks {
                    messages.push(ChatMessage { images, ..ChatMessage::user(text) });
                } else if blocks.is_empty() {
                    return Err(ApiError::parameter(at, "the content is empty; send at least one block"));
                }
            }
            ("assistant", Content::Blocks(blocks)) => messages.push(assistant(blocks, &at)?),
            ("system", content) => messages.push(ChatMessage::system(content.text(&at)?)),
            (role, _) => {
                let message = format!("{role:?} is not a role; the roles are user and assistant");
                return Err(ApiError::parameter(format!("messages[{index}].role"), message));
            }
        }
        Ok(())
    }
}

fn assistant(blocks: &[Value], at: &str) -> Result<ChatMessage, ApiError> {
    let mut message = ChatMessage::assistant("");
    for (block, at) in numbered(blocks, at) {
        match kind(block) {
            "text" => message.content.push_str(string(block, "text", &at)?),
            "thinking" => {
                let reasoning = message.reasoning.get_or_insert_default();
                reasoning.push_str(string(block, "thinking", &at)?);
            }
            // Reasoning that only its provider can read.
            "redacted_thinking" => {}
            "tool_use" => message.tool_calls.push(ToolCall {
                id: string(block, "id", &at)?.to_owned(),
                name: string(block, "name", &at)?.to_owned(),
                arguments: match &block["input"] {
                    input @ Value::Object(_) => input.to_string(),
                    Value::Null => "{}".to_owned(),
                    _ => {
                        return Err(ApiError::parameter(
                            format!("{at}.input"),
                            "the input must be an object",
                        ));
                    }
                },
            }),
            other => return Err(unsupported(other, &at)),
        }
    }
    Ok(message)
}

/// Returns the image of a block, which stands at the offset `at_text` of its message's text.
fn picture(block: &Value, at_text: usize, part: usize, at: &str) -> Result<Image, ApiError> {
    let source = &block["source"];
    let url = match (source["type"].as_str(), source["media_type"].as_str(), source["data"].as_str()) {
        (Some("base64"), Some(kind), Some(data)) => format!("data:{kind};base64,{data}"),
        (Some("url"), ..) => string(source, "url", &format!("{at}.source"))?.to_owned(),
        _ => {
            let message = "the source of an image must be {\"type\": \"base64\", \"media_type\": …, \"data\": …} or \
                           {\"type\": \"url\", \"url\": …}";
            return Err(ApiError::parameter(format!("{at}.source"), message));
        }
    };
    image::read(&json!({"url": url}), at_text, part).map_err(|message| ApiError::parameter(at, message))
}

fn tool_result(block: &Value, at: &str) -> Result<ChatMessage, ApiError> {
    let content = match &block["content"] {
        Value::Null => String::new(),
        Value::String(text) => text.clone(),
        Value::Array(blocks) => texts_of(blocks, &format!("{at}.content"))?,
        _ => {
            return Err(ApiError::parameter(
                format!("{at}.content"),
                "the content of a result must be a string or a list of blocks",
            ));
        }
    };
    let failed = block["is_error"].as_bool().unwrap_or(false);
    let content = if failed { format!("Error: {content}") } else { content };
    Ok(ChatMessage::tool(string(block, "tool_use_id", at)?, content))
}

/// Returns the text of blocks that may only be of type `text`.
fn texts_of(blocks: &[Value], at: &str) -> Result<String, ApiError> {
    let mut text = String::new();
    for (block, at) in numbered(blocks, at) {
        match kind(block) {
            "text" => text.push_str(string(block, "text", &at)?),
            other => return Err(unsupported(other, &at)),
        }
    }
    Ok(text)
}

fn numbered<'a>(blocks: &'a [Value], at: &str) -> impl Iterator<Item = (&'a Value, String)> {
    blocks.iter().enumerate().map(move |(index, block)| (block, format!("{at}[{index}]")))
}

fn kind(block: &Value) -> &str {
    block["type"].as_str().unwrap_or("?")
}

fn string<'a>(block: &'a Value, field: &str, at: &str) -> Result<&'a str, ApiError> {
    block[field].as_str().ok_or_else(|| {
        let param = format!("{at}.{field}");
        ApiError::parameter(&param, format!("`{param}` must be a string"))
    })
}

fn unsupported(kind: &str, at: &str) -> ApiError {
    let message = format!(
        "a block of type {kind:?} is not supported here; supported are text, thinking and tool_use of the assistant, and \
         text, image and tool_result of the user"
    );
    ApiError::parameter(at, message)
}

fn value_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(values) => values.iter().map(value_bytes).sum(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + value_bytes(value)).sum(),
        _ => 8,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::chat::Role;

    fn read(turns: Value) -> Result<Vec<ChatMessage>, ApiError> {
        let turns: Vec<Turn> = serde_json::from_value(turns).unwrap();
        let mut messages = Vec::new();
        for (index, turn) in turns.iter().enumerate() {
            turn.read(index, &mut messages)?;
        }
        Ok(messages)
    }

    #[test]
    fn blocks_become_messages_with_calls_and_results() {
        let messages = read(json!([
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "Let me see."},
                {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
                {"type": "tool_use", "id": "t2", "name": "now"}]},
            {"role": "user", "content": [
                {"type": "text", "text": "and?"},
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "no clock", "is_error": true}]}]))
        .unwrap();
        let shown: Vec<(Role, &str)> = messages.iter().map(|m| (m.role, m.content.as_str())).collect();
        assert_eq!(
            shown,
            [
                (Role::User, "ab"),
                (Role::Assistant, "Let me see."),
                (Role::Tool, "sun"),
                (Role::Tool, "Error: no clock"),
                (Role::User, "and?"),
            ]
        );
        assert_eq!(messages[1].reasoning.as_deref(), Some("hm"));
        let calls = &messages[1].tool_calls;
        assert_eq!((calls[0].arguments.as_str(), calls[1].arguments.as_str()), ("{\"at\":1}", "{}"));
        assert_eq!(messages[2].tool_call_id.as_deref(), Some("t1"));
    }

    #[test]
    fn images_keep_their_position_between_the_texts_of_a_message() {
        let source = json!({"type": "url", "url": "https://bees.example/hive.png"});
        let blocks = json!([{"type": "text", "text": "Is this "}, {"type": "image", "source": source}, {"type": "text", "text": "a hive?"}]);
        let messages = read(json!([{"role": "user", "content": blocks}])).unwrap();
        assert_eq!(messages[0].content, "Is this a hive?");
        assert_eq!((messages[0].images[0].at, messages[0].images[0].part), (8, 1));
    }

    #[test]
    fn errors_name_the_block() {
        for (content, param) in [
            (json!([{"type": "document", "source": {}}]), "messages[0].content[0]"),
            (json!([{"type": "image", "source": {}}]), "messages[0].content[0].source"),
            (
                json!([{"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "?"}}]),
                "messages[0].content[0]",
            ),
            (json!([{"type": "text"}]), "messages[0].content[0].text"),
            (json!([{"type": "tool_result", "content": "x"}]), "messages[0].content[0].tool_use_id"),
            (
                json!([{"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image"}]}]),
                "messages[0].content[0].content[0]",
            ),
            (json!([]), "messages[0].content"),
        ] {
            let error = read(json!([{"role": "user", "content": content}])).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", error.message);
        }
        let error = read(json!([{"role": "tool", "content": "x"}])).unwrap_err();
        assert_eq!(error.param.as_deref(), Some("messages[0].role"));
    }
}
