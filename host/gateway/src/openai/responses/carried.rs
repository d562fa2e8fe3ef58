//! Reasoning that a client carries from one response to the next, because neither it nor the host stores the first.
//!
//! Clients of OpenAI's API drop the text of reasoning and keep `encrypted_content`. Here, that field has the text in Base64:
//! the client has got it in `content` as well, so there is nothing to hide from it, and any host can read it without a key.

use base64::{Engine as _, engine::general_purpose::STANDARD};

/// The beginning of a text that this host reads.
const PREFIX: &str = "skep1.";

/// Returns the text in which a client carries the reasoning.
pub(super) fn packed(reasoning: &str) -> String {
    format!("{PREFIX}{}", STANDARD.encode(reasoning))
}

/// Returns the reasoning in such a text; `None` for one that another server has made.
pub(super) fn unpacked(text: &str) -> Option<String> {
    let bytes = STANDARD.decode(text.strip_prefix(PREFIX)?).ok()?;
    String::from_utf8(bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_texts_of_this_host_are_read() {
        for reasoning in ["", "Rome is far. é\n"] {
            assert_eq!(unpacked(&packed(reasoning)).as_deref(), Some(reasoning));
        }
        for text in ["", "gAAAAABo", "skep1.%", "skep1./w=="] {
            assert_eq!(unpacked(text), None, "{text}");
        }
    }
}
