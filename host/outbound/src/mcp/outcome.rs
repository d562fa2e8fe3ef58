//! Converts a server's answer to a call into a JSON value or an error message.

use crate::{ServedTool, ToolServerError};
use rmcp::model::{CallToolResult, ContentBlock};
use serde_json::Value;

/// Maximum length of an error message that is passed on.
const MAX_ERROR_CHARS: usize = 2_000;

/// Returns the structured result if there is one, otherwise the text, otherwise the content blocks as JSON.
pub(super) fn value(
    result: CallToolResult,
    tool: &ServedTool,
    limit: usize,
) -> Result<Value, ToolServerError> {
    let failed = |message: String| Err(ToolServerError::Failed(message));
    let text = texts(&result.content);
    if result.is_error == Some(true) {
        return failed(cut(text.as_deref().unwrap_or("the tool failed without giving a reason")));
    }
    let value = match (result.structured_content, text) {
        (Some(structured), _) => structured,
        (None, _) if tool.output_schema.is_some() => {
            return failed(format!("{} declares a structured result but returned none", tool.name));
        }
        (None, Some(text)) => Value::String(text),
        (None, None) => serde_json::to_value(&result.content).unwrap_or_default(),
    };
    let bytes = value.to_string().len();
    if bytes > limit {
        return failed(format!("the result of {} has {bytes} bytes; the limit is {limit}", tool.name));
    }
    Ok(value)
}

/// Returns the joined text of the blocks if all of them are text, and `None` otherwise.
fn texts(content: &[ContentBlock]) -> Option<String> {
    let texts: Option<Vec<&str>> =
        content.iter().map(|block| block.as_text().map(|text| text.text.as_str())).collect();
    texts.filter(|texts| !texts.is_empty()).map(|texts| texts.join("\n"))
}

/// Shortens a message of the server and replaces its control characters other than line breaks, which a terminal
/// would interpret.
pub(super) fn cut(message: &str) -> String {
    let plain = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    message.chars().take(MAX_ERROR_CHARS).map(plain).collect()
}
