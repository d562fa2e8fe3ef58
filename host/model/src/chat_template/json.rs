//! Formats JSON the way Python's `json.dumps` does, because models were trained on that form.

use serde_json::Value;

/// The spacing and line breaks of the formatted text.
pub(super) struct Layout {
    indent: Option<usize>,
    item_separator: String,
    key_separator: String,
}

impl Layout {
    /// Separates with `", "` and `": "`, or puts one element on each line if `indent` is given.
    pub(super) fn new(indent: Option<usize>) -> Self {
        let item_separator = if indent.is_some() { "," } else { ", " };
        Layout { indent, item_separator: item_separator.to_owned(), key_separator: ": ".to_owned() }
    }

    pub(super) fn with_separators(self, item_separator: String, key_separator: String) -> Self {
        Layout { item_separator, key_separator, ..self }
    }

    /// Formats a value. Escapes only the characters that have to be escaped.
    pub(super) fn dump(&self, value: &Value) -> String {
        let mut text = String::new();
        self.write(value, 0, &mut text);
        text
    }

    fn write(&self, value: &Value, depth: usize, text: &mut String) {
        match value {
            Value::Array(items) if !items.is_empty() => {
                text.push('[');
                for (index, item) in items.iter().enumerate() {
                    self.separate(index, depth + 1, text);
                    self.write(item, depth + 1, text);
                }
                self.end_line(depth, text);
                text.push(']');
            }
            Value::Object(fields) if !fields.is_empty() => {
                text.push('{');
                for (index, (key, item)) in fields.iter().enumerate() {
                    self.separate(index, depth + 1, text);
                    text.push_str(&Value::from(key.as_str()).to_string());
                    text.push_str(&self.key_separator);
                    self.write(item, depth + 1, text);
                }
                self.end_line(depth, text);
                text.push('}');
            }
            Value::Number(number) if number.is_f64() => {
                text.push_str(&float(number.as_f64().unwrap_or_default()))
            }
            scalar_or_empty => text.push_str(&scalar_or_empty.to_string()),
        }
    }

    fn separate(&self, index: usize, depth: usize, text: &mut String) {
        if index > 0 {
            text.push_str(&self.item_separator);
        }
        self.end_line(depth, text);
    }

    fn end_line(&self, depth: usize, text: &mut String) {
        if let Some(width) = self.indent {
            text.push('\n');
            text.extend(std::iter::repeat_n(' ', width * depth));
        }
    }
}

/// Escapes all non-ASCII characters of a JSON text. Only strings contain such characters.
pub(super) fn ascii(text: &str) -> String {
    let mut escaped = String::with_capacity(text.len());
    for character in text.chars() {
        match character.is_ascii() {
            true => escaped.push(character),
            false => character.encode_utf16(&mut [0; 2]).iter().for_each(|unit| {
                escaped.push_str(&format!("\\u{unit:04x}"));
            }),
        }
    }
    escaped
}

/// Formats the shortest digits that parse back to the same value, with an exponent of at least two
/// digits below 1e-4 and from 1e16 on.
pub(super) fn float(value: f64) -> String {
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>().unwrap_or_default() {
        -4..16 => format!("{value:?}"),
        exponent => format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn separators_and_escapes_are_those_requested() {
        let value = serde_json::json!({"a": ["é🙂", 1], "b": {}});
        let tight = Layout::new(None).with_separators(",".to_owned(), ":".to_owned());
        assert_eq!(tight.dump(&value), r#"{"a":["é🙂",1],"b":{}}"#);
        assert_eq!(ascii(&Layout::new(None).dump(&value)), r#"{"a": ["\u00e9\ud83d\ude42", 1], "b": {}}"#);
    }

    #[test]
    fn floats_are_formatted_as_in_python() {
        let cases = [
            (1.0, "1.0"),
            (0.5, "0.5"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-2.5e-7, "-2.5e-07"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0, "0.0"),
        ];
        for (value, expected) in cases {
            assert_eq!(float(value), expected);
        }
    }
}
