//! Hermes: a call is a JSON object between two tags. Qwen 2.5, Qwen 3 and many others write it, and it is the markup for
//! models whose template shows no other.
//!
//! Invariant: a call that a client sends back is written in the spelling of templates, which the grammar also
//! proposes. If the model used that spelling, the text is the text that the model produced, and so it has the
//! same position in the prefix tree.

use super::{CallForm, CallIds, Markup, Reading};
use crate::chat::message::ToolCall;

pub(in crate::chat) const OPEN: &str = "<tool_call>";
pub(in crate::chat) const CLOSE: &str = "</tool_call>";
pub(in crate::chat) const RESPONSE_OPEN: &str = "<tool_response>";
pub(in crate::chat) const RESPONSE_CLOSE: &str = "</tool_response>";
/// Markers around the descriptions of the tools.
pub(in crate::chat) const TOOLS_OPEN: &str = "<tools>";
pub(in crate::chat) const TOOLS_CLOSE: &str = "</tools>";
/// Separator between two calls.
pub(in crate::chat) const BETWEEN: &str = "\n";

/// Markup that never appears in an answer outside of a call.
pub(in crate::chat) const RESERVED: [&str; 5] =
    [CLOSE, RESPONSE_OPEN, RESPONSE_CLOSE, TOOLS_OPEN, TOOLS_CLOSE];

pub(super) static MARKUP: Markup = Markup {
    name: "hermes",
    signs: &[&[OPEN]],
    call: CallForm::Hermes,
    reading: Reading::Hermes,
    tokens: &[OPEN, CLOSE],
    reserved: &RESERVED,
    ids: CallIds::Own,
    reasoning_field: "reasoning_content",
    declaration: None,
};

/// Returns the text before the arguments of a call of `name`.
pub(in crate::chat) fn head(name: &str) -> String {
    // Tool names contain no characters that JSON escapes, but a name that a client invents may.
    let name = serde_json::Value::from(name);
    format!("{OPEN}\n{{\"name\": {name}, \"arguments\": ")
}

/// Returns the text after the arguments.
pub(in crate::chat) fn tail() -> String {
    format!("}}\n{CLOSE}")
}

/// Returns the text of an assistant message with its calls.
pub(in crate::chat) fn assistant(content: &str, calls: &[ToolCall]) -> String {
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
