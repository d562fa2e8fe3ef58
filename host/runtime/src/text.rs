//! Makes text from agents safe for a terminal: characters that would move the cursor, change colors
//! or imitate another log line are escaped. Also finds the name that was meant by a misspelled one.

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

/// Maximum number of characters of a client's text that an error shows.
const MAX_SHOWN_CHARS: usize = 80;

/// Returns a client's id or name as errors show it, which may be shorter.
pub fn excerpt(text: &str) -> String {
    text.chars().take(MAX_SHOWN_CHARS).collect()
}

/// Returns the first `bytes` of a text, or slightly fewer so that no character is split.
pub(crate) fn cut(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// Returns the known name that resembles an unknown one most, if one does.
pub fn nearest_name<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    if unknown.len() <= 2 {
        return None;
    }
    let known: Vec<&str> = known.into_iter().collect();
    let distance = |name: &str| strsim::damerau_levenshtein(unknown, name);
    let nearest = known.iter().copied().min_by_key(|name| distance(name))?;
    // Allows one typo per three letters, or one name being a prefix of the other.
    if distance(nearest) <= 1.max(unknown.len() / 3) {
        return Some(nearest);
    }
    known.into_iter().find(|name| name.starts_with(unknown) || unknown.starts_with(name))
}

/// Returns the known name that resembles an unknown one as an addition to a sentence; empty if there is none.
pub fn did_you_mean<'a>(unknown: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    nearest_name(unknown, known).map(|name| format!("; did you mean {name:?}?")).unwrap_or_default()
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
    fn a_misspelled_name_is_recognized() {
        let known = ["concierge", "echo", "echo-loud"];
        for (unknown, meant) in [
            ("conceirge", Some("concierge")),
            ("echos", Some("echo")),
            ("conc", Some("concierge")),
            ("xx", None),
            ("orders", None),
        ] {
            assert_eq!(nearest_name(unknown, known), meant, "{unknown}");
        }
        assert_eq!(did_you_mean("ecko", known), "; did you mean \"echo\"?");
        assert_eq!(did_you_mean("orders", known), "");
    }

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
