//! Results that consist of parts: texts, images, audio, and resources.
//!
//! A tool returns parts if its output schema says `"x-mcp-content": true`. Its result is then an object with the array
//! `content`, whose entries are content blocks of the protocol.

use rmcp::model::{ContentBlock, ResourceContents, Role};
use serde_json::Value;
use skep_runtime::{RuntimeError, ToolDefinition};

/// The key of an output schema that says that the result consists of parts.
const MARK: &str = "x-mcp-content";
/// Maximum number of parts of a result.
const MAX_PARTS: usize = 256;

/// One part of a result. In a prompt, each part is a message of this role.
pub(super) struct Part {
    pub(super) role: Role,
    pub(super) block: ContentBlock,
}

/// Returns whether the results of a tool consist of parts.
pub(super) fn has_parts(tool: &ToolDefinition) -> bool {
    tool.output_schema.as_ref().is_some_and(is_marked)
}

pub(super) fn is_marked(schema: &Value) -> bool {
    schema[MARK] == true
}

/// Returns the parts of a result.
pub(super) fn parts(result: &Value) -> Result<Vec<Part>, RuntimeError> {
    let wrong = |why: String| RuntimeError::AgentFailed {
        message: format!("the tool's result does not consist of parts, as its output schema says: {why}"),
    };
    let Some(blocks) = result["content"].as_array() else {
        return Err(wrong("it has no array `content`".to_owned()));
    };
    if blocks.len() > MAX_PARTS {
        return Err(wrong(format!("it has {} parts; at most {MAX_PARTS} are allowed", blocks.len())));
    }
    let part = |(index, block): (usize, &Value)| {
        let role = match block["role"].as_str() {
            Some("assistant") => Role::Assistant,
            None | Some("user") => Role::User,
            Some(_) => return Err(wrong(format!("at /content/{index}/role: it must be user or assistant"))),
        };
        let mut block = block.clone();
        if let Some(members) = block.as_object_mut() {
            members.remove("role");
        }
        let block =
            serde_json::from_value(block).map_err(|error| wrong(format!("at /content/{index}: {error}")))?;
        Ok(Part { role, block })
    };
    blocks.iter().enumerate().map(part).collect()
}

/// Returns the contents of a resource that a tool has read.
pub(super) fn contents(
    result: Value,
    tool: &ToolDefinition,
    uri: &str,
    mime_type: Option<&str>,
) -> Result<Vec<ResourceContents>, RuntimeError> {
    let text = |text: String, kind: &str| {
        ResourceContents::text(text, uri).with_mime_type(mime_type.unwrap_or(kind).to_owned())
    };
    if !has_parts(tool) {
        return Ok(vec![match result {
            Value::String(read) => text(read, "text/plain"),
            value => text(value.to_string(), "application/json"),
        }]);
    }
    let blob = |data: String, kind: String| ResourceContents::blob(data, uri).with_mime_type(kind);
    let content = |part: Part| match part.block {
        ContentBlock::Text(read) => Ok(text(read.text, "text/plain")),
        ContentBlock::Image(image) => Ok(blob(image.data, image.mime_type)),
        ContentBlock::Audio(audio) => Ok(blob(audio.data, audio.mime_type)),
        ContentBlock::Resource(embedded) => Ok(embedded.resource),
        _ => Err(RuntimeError::AgentFailed {
            message: format!("{:?} returned a link; a resource must return its contents", tool.name),
        }),
    };
    parts(&result)?.into_iter().map(content).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use skep_runtime::ToolHints;

    #[test]
    fn parts_are_read_with_their_roles_and_errors_name_the_position() {
        let result = json!({"content": [
            {"type": "text", "text": "look"},
            {"type": "image", "data": "aGk=", "mimeType": "image/png", "role": "assistant"},
            {"type": "resource", "resource": {"uri": "x:y", "text": "z"}},
            {"type": "resource_link", "uri": "x:y", "name": "z"},
        ]});
        let read = parts(&result).expect("parts");
        assert_eq!(
            read.iter().map(|part| &part.role).collect::<Vec<_>>(),
            [&Role::User, &Role::Assistant, &Role::User, &Role::User]
        );
        assert!(matches!(&read[1].block, ContentBlock::Image(image) if image.mime_type == "image/png"));
        for (result, why) in [
            (json!({}), "no array `content`"),
            (json!({"content": [{"type": "text"}]}), "at /content/0"),
            (json!({"content": [{"type": "text", "text": "a"}, {"type": "film"}]}), "at /content/1"),
            (json!({"content": [{"type": "text", "text": "a", "role": "system"}]}), "user or assistant"),
            (json!({"content": vec![json!({"type": "text", "text": "a"}); 257]}), "at most 256"),
        ] {
            let message = parts(&result).err().expect(why).to_string();
            assert!(message.contains(why), "{message}");
        }
    }

    #[test]
    fn a_resource_has_the_type_that_its_value_or_its_part_has() {
        let tool = |output_schema| ToolDefinition {
            name: "read".into(),
            description: String::new(),
            input_schema: json!({"type": "object"}),
            output_schema,
            hints: ToolHints::default(),
            timeout_ms: None,
            retries: 0,
            needs_approval: false,
        };
        let read = |result, schema, kind| {
            let read = contents(result, &tool(schema), "x:y", kind).expect("contents");
            serde_json::to_value(read).expect("JSON")
        };
        assert_eq!(
            read(json!("a"), None, None),
            json!([{"uri": "x:y", "mimeType": "text/plain", "text": "a"}])
        );
        assert_eq!(
            read(json!({"a": 1}), None, None),
            json!([{"uri": "x:y", "mimeType": "application/json", "text": "{\"a\":1}"}])
        );
        assert_eq!(
            read(json!("a"), None, Some("text/css")),
            json!([{"uri": "x:y", "mimeType": "text/css", "text": "a"}])
        );
        let image = json!({"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]});
        assert_eq!(
            read(image, Some(json!({"x-mcp-content": true})), Some("text/css")),
            json!([{"uri": "x:y", "mimeType": "image/png", "blob": "aGk="}])
        );
    }
}
