//! The markup of a tool call: the one form in which calls are asked for, forced, found and shown again.
//!
//! Invariant: `call` writes exactly what `tool_grammar` forces, so that a call which a client sends back has the text
//! that the model produced, and so the same place in the prefix tree.

use super::message::ToolCall;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const RESPONSE_OPEN: &str = "<tool_response>";
pub(super) const RESPONSE_CLOSE: &str = "</tool_response>";
/// Between two calls.
pub(super) const BETWEEN: &str = "\n";

/// What comes before the arguments of a call of `name`.
pub(super) fn head(name: &str) -> String {
    // Tool names have no characters that JSON escapes; those that a client invents may.
    let name = serde_json::Value::from(name);
    format!("{OPEN}\n{{\"name\": {name}, \"arguments\": ")
}

/// What comes after the arguments.
pub(super) fn tail() -> String {
    format!("}}\n{CLOSE}")
}

/// An assistant message's text with its calls.
pub(super) fn assistant(content: &str, calls: &[ToolCall]) -> String {
    let mut text = content.to_owned();
    for call in calls {
        if !text.is_empty() && !text.ends_with('\n') {
            text.push_str(BETWEEN);
        }
        let arguments = if call.arguments.trim().is_empty() { "{}" } else { call.arguments.as_str() };
        text.push_str(&head(&call.name));
        text.push_str(arguments);
        text.push_str(&tail());
    }
    text
}
