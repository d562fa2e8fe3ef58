//! The markup of tools and their calls: the one form in which calls are requested, forced, found and shown
//! again.
//!
//! Invariant: a call that a client sends back is written in the spelling of templates, which the grammar also
//! proposes. If the model used that spelling, the text is the text that the model produced, and so it has the
//! same position in the prefix tree.

use super::message::ToolCall;

pub(super) const OPEN: &str = "<tool_call>";
pub(super) const CLOSE: &str = "</tool_call>";
pub(super) const RESPONSE_OPEN: &str = "<tool_response>";
pub(super) const RESPONSE_CLOSE: &str = "</tool_response>";
/// Markers around the descriptions of the tools.
pub(super) const TOOLS_OPEN: &str = "<tools>";
pub(super) const TOOLS_CLOSE: &str = "</tools>";
/// Separator between two calls.
pub(super) const BETWEEN: &str = "\n";

/// Markup that never appears in an answer outside of a call.
pub(super) const RESERVED: [&str; 5] = [CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE, TOOLS_OPEN, TOOLS_CLOSE];

/// Returns the text before the arguments of a call of `name`.
pub(super) fn head(name: &str) -> String {
    // Tool names contain no characters that JSON escapes, but a name that a client invents may.
    let name = serde_json::Value::from(name);
    format!("{OPEN}\n{{\"name\": {name}, \"arguments\": ")
}

/// Returns the text after the arguments.
pub(super) fn tail() -> String {
    format!("}}\n{CLOSE}")
}

/// Returns the text of an assistant message with its calls.
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
