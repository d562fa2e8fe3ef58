//! Locates an instance that a validator names within the text of a JSON value.
//!
//! The module also detects what a parsed value no longer shows: a key that occurs twice in an object.

use serde_json::Value;

use crate::json_pointer;

/// A cursor over the text of a value.
#[derive(Debug)]
pub(super) struct Spans<'a> {
    text: &'a [u8],
    at: usize,
    /// Offset of the byte after the key that was entered last.
    key_end: usize,
}

/// A key that occurs twice in an object, and the offset of the byte after its second occurrence.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct RepeatedKey {
    pub key: String,
    pub pointer: String,
    pub end: usize,
}

/// Returns the offset of the byte after the instance that `pointer` names in `text`, which is valid JSON. If
/// there is no such instance, returns the end of the text.
pub(super) fn end_of(text: &[u8], pointer: &str) -> usize {
    let steps = pointer.split('/').skip(1).map(json_pointer::unescape);
    let mut spans = Spans { text, at: 0, key_end: 0 };
    for step in steps {
        if !spans.enter(&step) {
            return text.len();
        }
    }
    spans.skip_blanks();
    spans.skip_value(&mut None, "");
    spans.at.min(text.len())
}

/// Returns the offset of the byte after the key `name` of the object that `pointer` names.
pub(super) fn end_of_key(text: &[u8], pointer: &str, name: &str) -> usize {
    let mut spans = Spans { text, at: 0, key_end: 0 };
    let steps = pointer.split('/').skip(1).map(json_pointer::unescape);
    for step in steps.chain([name.to_string()]) {
        if !spans.enter(&step) {
            return text.len();
        }
    }
    spans.key_end.min(text.len())
}

/// Returns the first key of `text`, which is valid JSON, that occurs twice in its object.
pub(super) fn repeated_key(text: &[u8]) -> Option<RepeatedKey> {
    let mut repeated = None;
    let mut spans = Spans { text, at: 0, key_end: 0 };
    spans.skip_blanks();
    spans.skip_value(&mut Some(&mut repeated), "");
    repeated
}

/// Returns the index of the second of the first two items that are equal in the sense of JSON Schema.
pub(super) fn second_equal(items: &[Value]) -> Option<usize> {
    (1..items.len()).find(|at| items[..*at].iter().any(|earlier| is_equal(earlier, &items[*at])))
}

/// Compares two values: numbers by their value, objects whatever the order of their members.
fn is_equal(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => {
            let integers = one.as_i128().zip(other.as_i128());
            integers.map_or_else(|| one.as_f64() == other.as_f64(), |(one, other)| one == other)
        }
        (Value::Array(one), Value::Array(other)) => {
            one.len() == other.len() && one.iter().zip(other).all(|(one, other)| is_equal(one, other))
        }
        (Value::Object(one), Value::Object(other)) => {
            let is_in_other =
                |(key, value): (&String, &Value)| other.get(key).is_some_and(|other| is_equal(value, other));
            one.len() == other.len() && one.iter().all(is_in_other)
        }
        (one, other) => one == other,
    }
}

impl Spans<'_> {
    fn byte(&self) -> Option<u8> {
        self.text.get(self.at).copied()
    }

    fn skip_blanks(&mut self) {
        while self.byte().is_some_and(|byte| byte.is_ascii_whitespace()) {
            self.at += 1;
        }
    }

    /// Moves to the member or item of the current value. Returns false if the value has none of that name.
    fn enter(&mut self, step: &str) -> bool {
        self.skip_blanks();
        let is_object = self.byte() == Some(b'{');
        if !is_object && self.byte() != Some(b'[') {
            return false;
        }
        self.at += 1;
        let mut index = 0usize;
        loop {
            self.skip_blanks();
            let is_here = match self.byte() {
                None | Some(b'}' | b']') => return false,
                Some(_) if is_object => {
                    let key = self.key();
                    self.key_end = self.at;
                    self.skip_colon();
                    key == step
                }
                Some(_) => step.parse() == Ok(index),
            };
            if is_here {
                return true;
            }
            self.skip_blanks();
            self.skip_value(&mut None, "");
            self.skip_blanks();
            self.at += usize::from(self.byte() == Some(b','));
            index += 1;
        }
    }

    fn skip_colon(&mut self) {
        self.skip_blanks();
        self.at += usize::from(self.byte() == Some(b':'));
    }

    fn key(&mut self) -> String {
        let start = self.at;
        self.skip_text();
        serde_json::from_slice(&self.text[start..self.at.min(self.text.len())]).unwrap_or_default()
    }

    fn skip_text(&mut self) {
        self.at += 1;
        while let Some(byte) = self.byte() {
            self.at += if byte == b'\\' { 2 } else { 1 };
            if byte == b'"' {
                return;
            }
        }
    }

    fn skip_value(&mut self, repeated: &mut Option<&mut Option<RepeatedKey>>, pointer: &str) {
        match self.byte() {
            Some(b'"') => self.skip_text(),
            Some(b'{' | b'[') => self.skip_container(repeated, pointer),
            _ => {
                while self
                    .byte()
                    .is_some_and(|b| !matches!(b, b',' | b'}' | b']') && !b.is_ascii_whitespace())
                {
                    self.at += 1;
                }
            }
        }
    }

    fn skip_container(&mut self, repeated: &mut Option<&mut Option<RepeatedKey>>, pointer: &str) {
        let is_object = self.byte() == Some(b'{');
        self.at += 1;
        let mut keys = Vec::new();
        loop {
            self.skip_blanks();
            match self.byte() {
                None => return,
                Some(b'}' | b']') => {
                    self.at += 1;
                    return;
                }
                Some(b',') => self.at += 1,
                Some(_) => {
                    let mut inner = String::new();
                    if let Some(first) = repeated {
                        let step = if is_object { self.key() } else { keys.len().to_string() };
                        if is_object && first.is_none() && keys.contains(&step) {
                            **first = Some(RepeatedKey {
                                key: step.clone(),
                                pointer: pointer.to_string(),
                                end: self.at,
                            });
                        }
                        inner = format!("{pointer}/{}", json_pointer::escape(&step));
                        keys.push(step);
                    } else if is_object {
                        self.skip_text();
                    }
                    if is_object {
                        self.skip_colon();
                        self.skip_blanks();
                    }
                    self.skip_value(repeated, &inner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const TEXT: &str = r#"{"a": [1, {"b": "x\"]"} , [ ]],"c/d" :{"e":-2.5 }, "f": true}"#;

    #[test]
    fn an_instance_ends_where_its_text_does() {
        for (pointer, text) in [
            ("", TEXT),
            ("/a/0", "1"),
            ("/a/1/b", r#""x\"]""#),
            ("/a/2", "[ ]"),
            ("/c~1d/e", "-2.5"),
            ("/f", "true"),
        ] {
            let end = end_of(TEXT.as_bytes(), pointer);
            assert!(TEXT[..end].ends_with(text), "{pointer}: {}", &TEXT[..end]);
        }
        assert_eq!(end_of(TEXT.as_bytes(), "/no/such"), TEXT.len());
    }

    #[test]
    fn a_key_is_found_before_its_value() {
        let end = end_of_key(TEXT.as_bytes(), "/c~1d", "e");
        assert!(TEXT[..end].ends_with("\"e\""), "{}", &TEXT[..end]);
    }

    #[test]
    fn a_repeated_key_is_found() {
        assert_eq!(repeated_key(TEXT.as_bytes()), None);
        let text = r#"[{"a": 1, "b": {"a": 2}}, {"x": 0, "\u0078": 1}]"#;
        let repeated = repeated_key(text.as_bytes()).unwrap();
        assert_eq!((repeated.key.as_str(), repeated.pointer.as_str()), ("x", "/1"));
        assert!(text[..repeated.end].ends_with(r#""\u0078""#));
    }

    #[test]
    fn items_are_equal_by_value() {
        for (items, expected) in [
            (json!([1, 2, 3]), None),
            (json!([1, 2, 1.0]), Some(2)),
            (json!([{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]), Some(1)),
            (json!(["1", 1, true]), None),
        ] {
            assert_eq!(second_equal(items.as_array().unwrap()), expected, "{items}");
        }
    }
}
