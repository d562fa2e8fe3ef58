//! Converts a server's answer to a call into a JSON value or an error message.

use crate::{ServedTool, ToolServerError};
use rmcp::model::CallToolResult;
use serde_json::Value;

/// Maximum length of an error message that is passed on.
const MAX_ERROR_CHARS: usize = 2_000;

/// Returns the structured result if there is one, otherwise the text if there is nothing else, otherwise the content
/// blocks as JSON. The message of an error has all of its text.
pub(super) fn value(
    result: CallToolResult,
    tool: &ServedTool,
    limit: usize,
) -> Result<Value, ToolServerError> {
    let failed = |message: String| Err(ToolServerError::Failed(message));
    let texts: Vec<&str> =
        result.content.iter().filter_map(|block| block.as_text().map(|text| text.text.as_str())).collect();
    if result.is_error == Some(true) {
        return failed(match texts.is_empty() {
            true => "the tool failed without giving a reason".to_owned(),
            false => cut(&texts.join("\n")),
        });
    }
    let is_text = !texts.is_empty() && texts.len() == result.content.len();
    let value = match result.structured_content {
        Some(structured) => structured,
        None if tool.output_schema.is_some() => {
            return failed(format!("{} declares a structured result but returned none", tool.name));
        }
        None if is_text => Value::String(texts.join("\n")),
        None => serde_json::to_value(&result.content).unwrap_or_default(),
    };
    let bytes = value.to_string().len();
    if bytes > limit {
        return failed(format!("the result of {} has {bytes} bytes; the limit is {limit}", tool.name));
    }
    Ok(value)
}

/// Shortens a message of the server and replaces its control characters other than line breaks, which a terminal
/// would interpret.
pub(super) fn cut(message: &str) -> String {
    let plain = |c: char| if c.is_control() && c != '\n' { ' ' } else { c };
    message.chars().take(MAX_ERROR_CHARS).map(plain).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ToolHints;
    use serde_json::json;

    fn returned(result: Value) -> Result<Value, ToolServerError> {
        let tool = ServedTool {
            name: "print".to_owned(),
            description: String::new(),
            input_schema: json!({}),
            output_schema: None,
            hints: ToolHints::default(),
        };
        value(serde_json::from_value(result).expect("a result"), &tool, 1_000)
    }

    #[test]
    fn an_error_keeps_its_text_beside_other_content() {
        let picture = json!({"type": "image", "data": "AAAA", "mimeType": "image/png"});
        let text = |text: &str| json!({"type": "text", "text": text});
        let content = json!([text("no"), picture, text("paper")]);
        let failed = |why: &str| Err(ToolServerError::Failed(why.to_owned()));
        assert_eq!(returned(json!({"content": content, "isError": true})), failed("no\npaper"));
        assert_eq!(
            returned(json!({"content": [picture], "isError": true})),
            failed("the tool failed without giving a reason")
        );
        let blocks = returned(json!({"content": content})).expect("a result");
        assert_eq!((&blocks[0]["text"], &blocks[1]["type"]), (&json!("no"), &json!("image")));
        let both = json!({"content": [text("a"), text("b")]});
        assert_eq!(returned(both), Ok(json!("a\nb")));
    }
}
