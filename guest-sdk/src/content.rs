//! Results that consist of parts: texts, images, audio, and resources.

use std::borrow::Cow;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The result of a tool that consists of parts, for clients of the Model Context Protocol.
///
/// ```
/// use skep_sdk::{Content, tool};
///
/// /// Draws a red pixel.
/// #[tool(read_only)]
/// fn draw() -> Content {
///     let pixel: &[u8] = b"\x89PNG\r\n";
///     Content::new().text("A red pixel:").image(pixel, "image/png")
/// }
/// ```
///
/// For other agents and for the agent's own model, the result is JSON: an object with the array `content`.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Content {
    content: Vec<Value>,
}

impl Content {
    /// Creates a result without parts.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a text.
    pub fn text(self, text: impl Into<String>) -> Self {
        self.part(json!({"type": "text", "text": text.into()}))
    }

    /// Adds an image, such as one of the type `image/png`.
    pub fn image(self, bytes: &[u8], mime_type: &str) -> Self {
        self.part(json!({"type": "image", "data": base64(bytes), "mimeType": mime_type}))
    }

    /// Adds audio, such as one of the type `audio/wav`.
    pub fn audio(self, bytes: &[u8], mime_type: &str) -> Self {
        self.part(json!({"type": "audio", "data": base64(bytes), "mimeType": mime_type}))
    }

    /// Adds the text of a resource.
    pub fn resource(self, uri: &str, mime_type: &str, text: &str) -> Self {
        let resource = json!({"uri": uri, "mimeType": mime_type, "text": text});
        self.part(json!({"type": "resource", "resource": resource}))
    }

    /// Adds the bytes of a resource.
    pub fn resource_bytes(self, uri: &str, mime_type: &str, bytes: &[u8]) -> Self {
        let resource = json!({"uri": uri, "mimeType": mime_type, "blob": base64(bytes)});
        self.part(json!({"type": "resource", "resource": resource}))
    }

    /// Adds a link to a resource, which the client may read.
    pub fn link(self, uri: &str, name: &str) -> Self {
        self.part(json!({"type": "resource_link", "uri": uri, "name": name}))
    }

    /// Makes the last part a message of the model, in a prompt. All other parts are messages of the user.
    pub fn as_assistant(mut self) -> Self {
        if let Some(part) = self.content.last_mut() {
            part["role"] = "assistant".into();
        }
        self
    }

    fn part(mut self, part: Value) -> Self {
        self.content.push(part);
        self
    }
}

impl JsonSchema for Content {
    fn schema_name() -> Cow<'static, str> {
        "Content".into()
    }

    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "type": "object",
            "properties": {"content": {"type": "array", "items": {"type": "object"}}},
            "required": ["content"],
            "x-mcp-content": true,
        })
    }
}

/// Encodes bytes in Base64, with padding.
fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let byte = |index: usize| u32::from(chunk.get(index).copied().unwrap_or_default());
        let bits = byte(0) << 16 | byte(1) << 8 | byte(2);
        for digit in 0..4 {
            let is_padding = digit > chunk.len();
            let value = (bits >> (18 - 6 * digit)) & 63;
            text.push(if is_padding { '=' } else { char::from(DIGITS[value as usize]) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_encoded_with_padding() {
        for (bytes, text) in [
            (&b""[..], ""),
            (b"f", "Zg=="),
            (b"fo", "Zm8="),
            (b"foo", "Zm9v"),
            (b"foob", "Zm9vYg=="),
            (b"\xff\xfe\xfd", "//79"),
        ] {
            assert_eq!(base64(bytes), text);
        }
    }

    #[test]
    fn parts_stay_in_order_and_the_schema_is_marked() {
        let content = Content::new().text("a").as_assistant().link("x:y", "z").image(b"i", "image/png");
        let expected = json!({"content": [
            {"type": "text", "text": "a", "role": "assistant"},
            {"type": "resource_link", "uri": "x:y", "name": "z"},
            {"type": "image", "data": "aQ==", "mimeType": "image/png"},
        ]});
        assert_eq!(serde_json::to_value(&content).unwrap(), expected);
        assert_eq!(crate::schema::output_schema::<Content>()["x-mcp-content"], true);
    }
}
