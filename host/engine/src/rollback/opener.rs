//! The texts by which calls are found in an output.

use crate::CallMarkup;
use crate::request::CallPart;

/// The beginning of a call.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Opener {
    /// The first text of an answer that consists of calls.
    pub start: String,
    /// The text before the object of a call, or before its name; empty if no arguments are followed.
    pub text: String,
    /// The text before an answer that is not a call; empty if nothing stands before it.
    pub answer: String,
    /// Whether the text is followed by the name of the tool, and the arguments are an object of their own.
    pub names_tool: bool,
}

impl Opener {
    /// Returns the texts that this markup puts before calls.
    pub fn of(markup: &CallMarkup) -> Self {
        let text = markup.opener().unwrap_or_default();
        match markup {
            CallMarkup::Object(_) => {
                Opener { start: text.clone(), text, answer: String::new(), names_tool: false }
            }
            CallMarkup::Parts(parts) => {
                let written = |part: &CallPart| match part {
                    CallPart::Text(text) | CallPart::Token(_, text) => Some(text.clone()),
                    _ => None,
                };
                let start = parts.before.iter().chain(&parts.call).find_map(written);
                let answer = parts.before_text.iter().filter_map(written).collect();
                Opener { start: start.unwrap_or_default(), text, answer, names_tool: true }
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
