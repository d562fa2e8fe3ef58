//! Makes text from agents safe for a terminal: characters that would move the cursor, change colors
//! or imitate another log line are escaped.

use std::{borrow::Cow, fmt::Write as _};

/// Prefix of every line after the first, so that none can be mistaken for another log line.
const NEXT_LINE: &str = "\n    ";

/// Escapes characters that control a terminal or change the reading direction. Tabs are kept, and
/// so are line breaks, followed by an indentation.
pub fn for_terminal(text: &str) -> Cow<'_, str> {
    if !text.chars().any(is_control) {
        return Cow::Borrowed(text);
    }
    let mut shown = String::with_capacity(text.len() + 16);
    for character in text.replace("\r\n", "\n").chars() {
        match character {
            '\n' => shown.push_str(NEXT_LINE),
            control if is_control(control) => {
                write!(shown, "{}", control.escape_unicode()).expect("writing to a string does not fail");
            }
            other => shown.push(other),
        }
    }
    Cow::Owned(shown)
}

fn is_control(character: char) -> bool {
    let turns_direction = matches!(character, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    (character.is_control() && character != '\t') || turns_direction
}

/// Returns the first `bytes` of a text, or slightly fewer so that no character is split.
pub(crate) fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// Formats bytes as lowercase hexadecimal digits.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::with_capacity(64), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_escaped_and_other_text_is_kept() {
        for (text, shown) in [
            ("plain\tgrün 🐝", "plain\tgrün 🐝"),
            ("\u{1b}[31mred\u{1b}[0m", "\\u{1b}[31mred\\u{1b}[0m"),
            ("\u{1b}]0;title\u{7}", "\\u{1b}]0;title\\u{7}"),
            ("gone\rforged\u{8}\u{0}", "gone\\u{d}forged\\u{8}\\u{0}"),
            ("\u{9b}2J\u{7f}", "\\u{9b}2J\\u{7f}"),
            ("\u{202e}txt.exe", "\\u{202e}txt.exe"),
            ("one\ntwo\r\nthree", "one\n    two\n    three"),
        ] {
            assert_eq!(for_terminal(text), shown);
        }
    }
}
