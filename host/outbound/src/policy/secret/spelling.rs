//! Finds a value in bytes, in any encoding.
//!
//! Each character may occur literally, percent-encoded, as a JSON escape or as an HTML entity, in any mixture, as
//! servers produce it. The value may also occur in base64, which encodes it in three ways, depending on the number of
//! bytes before it.

use base64::{Engine as _, engine::general_purpose::STANDARD_NO_PAD};
use std::ops::Range;

/// Minimum length of a base64 pattern; shorter ones would match unrelated text.
const MIN_BASE64_CHARACTERS: usize = 8;
/// Maximum number of digits of a numeric entity, including leading zeros.
const MAX_ENTITY_DIGITS: usize = 8;
/// Named entities of ASCII characters.
const ENTITIES: [(&str, char); 39] = [
    ("amp", '&'),
    ("AMP", '&'),
    ("apos", '\''),
    ("ast", '*'),
    ("bsol", '\\'),
    ("colon", ':'),
    ("comma", ','),
    ("commat", '@'),
    ("dollar", '$'),
    ("equals", '='),
    ("excl", '!'),
    ("grave", '`'),
    ("gt", '>'),
    ("GT", '>'),
    ("Hat", '^'),
    ("lbrace", '{'),
    ("lbrack", '['),
    ("lcub", '{'),
    ("lowbar", '_'),
    ("lpar", '('),
    ("lsqb", '['),
    ("lt", '<'),
    ("LT", '<'),
    ("NewLine", '\n'),
    ("num", '#'),
    ("percnt", '%'),
    ("period", '.'),
    ("plus", '+'),
    ("quest", '?'),
    ("quot", '"'),
    ("QUOT", '"'),
    ("rbrace", '}'),
    ("rbrack", ']'),
    ("rcub", '}'),
    ("rpar", ')'),
    ("rsqb", ']'),
    ("semi", ';'),
    ("sol", '/'),
    ("verbar", '|'),
];

/// One encoding of a value: plain (with escapes) or base64 at one alignment.
pub(super) struct Pattern {
    characters: Vec<Character>,
    base64: Option<Base64>,
}

/// A character of a pattern, in the standard and the URL-safe alphabet of base64.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Character {
    usual: char,
    url_safe: char,
}

/// Whether the base64 characters next to a match contain some bits of the value besides unknown bits.
struct Base64 {
    shares_before: bool,
    shares_after: bool,
}

impl Pattern {
    /// Returns the patterns of all encodings of `value`.
    pub(super) fn of(value: &str) -> Vec<Pattern> {
        let plain = value.chars().map(|usual| Character { usual, url_safe: usual }).collect();
        let mut patterns = vec![Pattern { characters: plain, base64: None }];
        for before in 0..3 {
            patterns.extend(Self::in_base64(value, before));
        }
        patterns
    }

    /// Returns the base64 pattern of the value when `before` bytes (modulo 3) of other data precede it.
    fn in_base64(value: &str, before: usize) -> Option<Pattern> {
        let encoded = STANDARD_NO_PAD.encode([&[0; 2][..before], value.as_bytes()].concat());
        let (known_from, bits) = ([0, 2, 3][before], (before + value.len()) * 8);
        let known = encoded.get(known_from..bits / 6)?;
        let character = |usual| match usual {
            '+' => Character { usual, url_safe: '-' },
            '/' => Character { usual, url_safe: '_' },
            _ => Character { usual, url_safe: usual },
        };
        let base64 = Base64 { shares_before: before > 0, shares_after: bits % 6 > 0 };
        (known.len() >= MIN_BASE64_CHARACTERS)
            .then(|| Pattern { characters: known.chars().map(character).collect(), base64: Some(base64) })
    }

    /// Returns the first match at or after `from`.
    pub(super) fn find(&self, bytes: &[u8], from: usize) -> Option<Range<usize>> {
        let first = self.characters.first()?;
        let may_begin = |byte: u8| {
            matches!(byte, b'%' | b'&' | b'\\')
                || [first.usual, first.url_safe].iter().any(|c| first_byte(*c) == byte)
                || first.usual == ' ' && byte == b'+'
        };
        let (mut ends, mut next) = (Vec::new(), Vec::new());
        (from..bytes.len()).filter(|at| may_begin(bytes[*at])).find_map(|begin| {
            let end = self.ends_at(bytes, begin, &mut ends, &mut next)?;
            Some(self.with_neighbors(bytes, begin..end))
        })
    }

    /// Returns the end of the match that starts at `begin`. A byte may be a character or start an escape, so several
    /// ends are possible. The two lists are only reused buffers.
    fn ends_at(
        &self,
        bytes: &[u8],
        begin: usize,
        ends: &mut Vec<usize>,
        next: &mut Vec<usize>,
    ) -> Option<usize> {
        ends.clear();
        ends.push(begin);
        for (index, character) in self.characters.iter().enumerate() {
            next.clear();
            for at in ends.iter().copied() {
                let at = if self.base64.is_some() && index > 0 { skip_line_breaks(bytes, at) } else { at };
                spelled(bytes, at, character.usual, next);
                if character.url_safe != character.usual {
                    spelled(bytes, at, character.url_safe, next);
                }
            }
            std::mem::swap(ends, next);
            if ends.is_empty() {
                return None;
            }
        }
        ends.iter().copied().max()
    }

    /// Extends a match by the neighboring base64 characters that contain bits of the value.
    fn with_neighbors(&self, bytes: &[u8], found: Range<usize>) -> Range<usize> {
        let Some(base64) = &self.base64 else { return found };
        let is_base64 = |at: usize| {
            bytes.get(at).is_some_and(|byte| byte.is_ascii_alphanumeric() || b"+/-_".contains(byte))
        };
        let breaks = bytes[..found.start].iter().rev().take_while(|byte| b"\r\n".contains(byte)).count();
        let before =
            (found.start - breaks).checked_sub(1).filter(|at| base64.shares_before && is_base64(*at));
        let after = skip_line_breaks(bytes, found.end);
        let has_after = base64.shares_after && is_base64(after);
        before.unwrap_or(found.start)..if has_after { after + 1 } else { found.end }
    }
}

/// Adds the ends of all encodings of `wanted` that start here.
fn spelled(bytes: &[u8], at: usize, wanted: char, ends: &mut Vec<usize>) {
    let rest = bytes.get(at..).unwrap_or_default();
    let mut utf8 = [0; 4];
    let utf8 = wanted.encode_utf8(&mut utf8).as_bytes();
    let literal = rest.starts_with(utf8).then_some(utf8.len());
    let other = match rest.first() {
        Some(b'%') => percent_encoded(rest, utf8),
        Some(b'\\') => json_escape(rest, wanted),
        Some(b'&') => entity(rest, wanted),
        // HTML forms encode a space as a plus sign.
        Some(b'+') if wanted == ' ' => Some(1),
        _ => None,
    };
    for length in literal.into_iter().chain(other) {
        if !ends.contains(&(at + length)) {
            ends.push(at + length);
        }
    }
}

/// Returns the length of `%` and two digits for each byte.
fn percent_encoded(rest: &[u8], utf8: &[u8]) -> Option<usize> {
    let is_next = |(index, byte): (usize, &u8)| {
        rest.get(index * 3) == Some(&b'%')
            && hex(rest.get(index * 3 + 1..index * 3 + 3)) == Some(u32::from(*byte))
    };
    utf8.iter().enumerate().all(is_next).then_some(utf8.len() * 3)
}

fn json_escape(rest: &[u8], wanted: char) -> Option<usize> {
    let short = match rest.get(1)? {
        b'b' => '\u{8}',
        b'f' => '\u{c}',
        b'n' => '\n',
        b'r' => '\r',
        b't' => '\t',
        b'u' => {
            let mut units = [0; 2];
            let units = wanted.encode_utf16(&mut units);
            let is_next = |(index, unit): (usize, &u16)| {
                rest.get(index * 6..index * 6 + 2) == Some(b"\\u")
                    && hex(rest.get(index * 6 + 2..index * 6 + 6)) == Some(u32::from(*unit))
            };
            return units.iter().enumerate().all(is_next).then_some(units.len() * 6);
        }
        other if other.is_ascii() => char::from(*other),
        _ => return None,
    };
    // A backslash before a letter that is not an escape is a literal backslash.
    (short == wanted && (!wanted.is_ascii_alphanumeric())).then_some(2)
}

/// Returns the length of an entity. Its semicolon may be missing, as in browsers.
fn entity(rest: &[u8], wanted: char) -> Option<usize> {
    let (length, found) = match rest.get(1)? {
        b'#' => {
            let (from, radix) = if matches!(rest.get(2), Some(b'x' | b'X')) { (3, 16) } else { (2, 10) };
            let digits = rest[from..].iter().take(MAX_ENTITY_DIGITS);
            let digits = digits.take_while(|byte| char::from(**byte).is_digit(radix)).count();
            let text = std::str::from_utf8(&rest[from..from + digits]).ok()?;
            (from + digits, char::from_u32(u32::from_str_radix(text, radix).ok()?)?)
        }
        _ => {
            let of_wanted = ENTITIES.iter().filter(|(_, character)| *character == wanted);
            let (name, found) = { of_wanted }.find(|(name, _)| rest[1..].starts_with(name.as_bytes()))?;
            (1 + name.len(), *found)
        }
    };
    (found == wanted).then(|| length + usize::from(rest.get(length) == Some(&b';')))
}

/// Skips the line breaks that mail inserts into base64, either literal or as JSON escapes.
fn skip_line_breaks(bytes: &[u8], mut at: usize) -> usize {
    loop {
        let rest = &bytes[at.min(bytes.len())..];
        at += match rest {
            [b'\r' | b'\n', ..] => 1,
            [b'\\', b'r' | b'n', ..] => 2,
            _ => return at,
        };
    }
}

fn hex(digits: Option<&[u8]>) -> Option<u32> {
    let digits = digits?;
    let are_digits = digits.iter().all(u8::is_ascii_hexdigit);
    are_digits.then(|| u32::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()).flatten()
}

fn first_byte(character: char) -> u8 {
    character.encode_utf8(&mut [0; 4]).as_bytes()[0]
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::{STANDARD, URL_SAFE};

    const VALUE: &str = "s3cret/\"välue\" 🙂+?>";

    /// Returns the text without all matches.
    fn without(value: &str, text: &str) -> String {
        let mut bytes = text.as_bytes().to_vec();
        for pattern in Pattern::of(value) {
            while let Some(found) = pattern.find(&bytes, 0) {
                bytes.drain(found);
            }
        }
        String::from_utf8_lossy(&bytes).into_owned()
    }

    #[test]
    fn a_value_is_found_in_every_encoding() {
        let json = serde_json::to_string(VALUE).expect("a string serializes");
        let percent: String = VALUE.bytes().map(|byte| format!("%{byte:02x}")).collect();
        let decimal: String = VALUE.chars().map(|c| format!("&#{};", u32::from(c))).collect();
        let hexadecimal: String = VALUE.chars().map(|c| format!("&#x{:04X};", u32::from(c))).collect();
        let mut units = [0; 2];
        let escaped: String = VALUE
            .chars()
            .flat_map(|c| {
                c.encode_utf16(&mut units).iter().map(|u| format!("\\u{u:04x}")).collect::<Vec<_>>()
            })
            .collect();
        for spelling in [
            VALUE,
            &json[1..json.len() - 1],
            &percent,
            &percent.to_uppercase(),
            &decimal,
            &hexadecimal,
            &escaped,
            "s3cret&sol;&quot;v&#228;lue&quot; 🙂&plus;&quest;&gt;",
            "s3cret\\/\\\"v\\u00E4lue\\\"+\\ud83d\\ude42%2B?&gt",
            "s3cret%2F%22v%C3%A4lue%22%20%F0%9F%99%82%2B%3F%3E",
        ] {
            assert_eq!(without(VALUE, &format!("a{spelling}b")), "ab", "{spelling}");
        }
    }

    #[test]
    fn base64_is_found_in_every_alignment_alphabet_and_with_line_breaks() {
        for prefix in ["", "u", "us", "user:", "someone:"] {
            for suffix in ["", "!", "!!"] {
                let text = format!("{prefix}{VALUE}{suffix}");
                for encoded in [STANDARD.encode(&text), URL_SAFE.encode(&text)] {
                    let wrapped: String = encoded.chars().flat_map(|c| [c, '\n']).collect();
                    for encoded in
                        [&encoded, &encoded.replace('/', "\\/"), &encoded.replace('+', "%2B"), &wrapped]
                    {
                        let left = without(VALUE, encoded);
                        let left: String = left.chars().filter(char::is_ascii_alphanumeric).collect();
                        // Only data next to the value may be left.
                        let beside = (prefix.len() + suffix.len()) * 4 / 3 + 1;
                        assert!(left.len() <= beside, "{encoded}: {left}");
                    }
                }
            }
        }
    }

    #[test]
    fn similar_text_is_not_found() {
        for text in
            ["", "s3cret", "s3cret/\"valve\" 🙂+?>", "%", "&#", "&#x", "\\u", "\\", "&#99999999;", "%zz"]
        {
            assert_eq!(without(VALUE, text), text);
        }
        // `%25` may be literal characters or an escape of `%`.
        assert_eq!(without("100%25abcdefgh", "100%25abcdefgh 100%2525abcdefgh"), " ");
    }
}
