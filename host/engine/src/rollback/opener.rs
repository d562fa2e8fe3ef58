//! The texts by which calls are found in an output.

use std::sync::Arc;

use super::written_arguments::ArgumentTags;
use crate::CallMarkup;
use crate::request::{CallPart, ToolCallForm};

/// The beginning of a call.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Opener {
    /// The first text of an answer that consists of calls.
    pub start: String,
    /// The text before the object of a call, or before its name; empty if no arguments are followed.
    pub text: String,
    /// The text before an answer that is not a call; empty if nothing stands before it.
    pub answer: String,
    /// Whether the text is followed by the name of the tool, and the arguments are an object of their own.
    pub names_tool: bool,
    /// The tags of arguments that are written one by one.
    pub arguments: Option<Arc<ArgumentTags>>,
}

impl Opener {
    /// Returns the texts that the markup of this form puts before calls.
    pub fn of(form: &ToolCallForm) -> Self {
        let text = form.markup.opener().unwrap_or_default();
        match &form.markup {
            CallMarkup::Object(_) => Opener { start: text.clone(), text, ..Opener::default() },
            CallMarkup::Parts(parts) => {
                let written = |part: &CallPart| match part {
                    CallPart::Text(text) | CallPart::Token(_, text) => Some(text.clone()),
                    _ => None,
                };
                let start = parts.before.iter().chain(&parts.call).find_map(written);
                let answer = parts.before_text.iter().filter_map(written).collect();
                let arguments = ArgumentTags::of(parts, &form.tools).map(Arc::new);
                Opener { start: start.unwrap_or_default(), text, answer, names_tool: true, arguments }
            }
        }
    }

    /// Returns whether the rest of an output begins with a call rather than with JSON.
    pub fn starts(&self, rest: &[u8]) -> bool {
        let start = self.start.as_bytes();
        match (start.first(), rest.first()) {
            (Some(wanted), Some(found)) if wanted != found => false,
            (None, _) | (_, None) => false,
            // A special token that begins like JSON comes as a whole.
            (Some(b'[' | b'{' | b'"'), _) => rest.starts_with(start),
            _ => true,
        }
    }
}
