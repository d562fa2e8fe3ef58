//! What a server's answer to a call means: a JSON value, or words about what went wrong.

use crate::{ServedTool, ToolServerError};
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::Value;

/// Of what is passed on of an error.
const MAX_ERROR_CHARS: usize = 2_000;

/// The structured result if there is one, else the text, else the blocks as they are.
pub(super) fn value(
    result: CallToolResult,
    tool: &ServedTool,
    limit: usize,
) -> Result<Value, ToolServerError> {
    let failed = |message: String| Err(ToolServerError::Failed(message));
    let text = texts(&result.content);
    if result.is_error == Some(true) {
        return failed(cut(text.as_deref().unwrap_or("the tool failed and says nothing of why")));
    }
    let value = match (result.structured_content, text) {
        (Some(structured), _) => structured,
        (None, _) if tool.output_schema.is_some() => {
            return failed(format!("{} describes a structured result and gave none", tool.name));
        }
        (None, Some(text)) => Value::String(text),
        (None, None) => serde_json::to_value(&result.content).unwrap_or_default(),
    };
    let bytes = value.to_string().len();
    if bytes > limit {
        return failed(format!("the result of {} has {bytes} bytes; at most {limit} are taken", tool.name));
    }
    Ok(value)
}

/// Of blocks that are nothing but text.
fn texts(content: &[ContentBlock]) -> Option<String> {
    let texts: Option<Vec<&str>> =
        content.iter().map(|block| block.as_text().map(|text| text.text.as_str())).collect();
    texts.filter(|texts| !texts.is_empty()).map(|texts| texts.join("\n"))
}

/// Words of the other side, as far as they are passed on, and without what a terminal would obey.
pub(super) fn cut(message: &str) -> String {
    let plain = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    message.chars().take(MAX_ERROR_CHARS).map(plain).collect()
}
