//! Checks whether a JSON text is spelled in a way that a constrained answer may have.
//!
//! The accepted set: wherever JSON allows white space, nothing, one space, or a line break with at most 20
//! spaces or tabs; properties in the order of the schema; names without escapes that they do not need; `\u`
//! only in strings that may be anything. Whether the schema allows the value is not checked here.

use serde_json::Value;

/// Maximum number of spaces or tabs after a line break.
const MAX_INDENTATION: usize = 20;

/// Why a valid text is outside the accepted set. If there are several reasons, the first one in this order is
/// reported: the rules behind the first ones are narrower than they would have to be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Flaw {
    WhiteSpace,
    Escape,
    KeyOrder,
}

/// Returns what keeps `text`, which is JSON and valid for `schema`, out of the accepted set.
pub fn flaw(text: &str, schema: &Value) -> Option<Flaw> {
    let mut walk = Walk { rest: text, flaws: Vec::new() };
    walk.space();
    walk.value(schema);
    walk.space();
    walk.flaws.into_iter().min()
}

struct Walk<'a> {
    rest: &'a str,
    flaws: Vec<Flaw>,
}

impl<'a> Walk<'a> {
    fn value(&mut self, schema: &Value) {
        match self.rest.as_bytes().first() {
            Some(b'{') => self.object(schema),
            Some(b'[') => self.array(schema),
            Some(b'"') => {
                let text = self.string();
                let is_restricted = ["enum", "const", "pattern", "format"]
                    .iter()
                    .any(|keyword| schema.get(*keyword).is_some());
                if is_restricted && text.contains("\\u") {
                    self.flaws.push(Flaw::Escape);
                }
            }
            _ => {
                let end = self.rest.find([',', '}', ']', ' ', '\n', '\r', '\t']).unwrap_or(self.rest.len());
                self.rest = &self.rest[end..];
            }
        }
    }

    fn object(&mut self, schema: &Value) {
        let order: Vec<&String> =
            schema["properties"].as_object().into_iter().flat_map(|map| map.keys()).collect();
        let mut last = None;
        self.take(1);
        self.space();
        while !self.rest.is_empty() && !self.rest.starts_with('}') {
            let written = self.string();
            let name = serde_json::from_str::<String>(written).unwrap_or_default();
            if serde_json::to_string(&name).is_ok_and(|plain| plain != written) {
                self.flaws.push(Flaw::Escape);
            }
            // Names that the schema does not have come after those that it has.
            let place = order.iter().position(|known| **known == name).unwrap_or(order.len());
            if last.is_some_and(|last| place < last || place == last && place < order.len()) {
                self.flaws.push(Flaw::KeyOrder);
            }
            last = Some(place);
            self.space();
            self.take(1);
            self.space();
            self.value(schema["properties"].get(&name).unwrap_or(&Value::Null));
            self.after_value();
        }
        self.take(1);
    }

    fn array(&mut self, schema: &Value) {
        self.take(1);
        self.space();
        while !self.rest.is_empty() && !self.rest.starts_with(']') {
            self.value(&schema["items"]);
            self.after_value();
        }
        self.take(1);
    }

    fn after_value(&mut self) {
        self.space();
        if self.rest.starts_with(',') {
            self.take(1);
            self.space();
        }
    }

    /// Reads a string with its quotes, as it is written.
    fn string(&mut self) -> &'a str {
        let mut escaped = false;
        let end = self.rest.char_indices().skip(1).find(|(_, c)| {
            let ends = *c == '"' && !escaped;
            escaped = *c == '\\' && !escaped;
            ends
        });
        let (text, rest) = self.rest.split_at(end.map_or(self.rest.len(), |(at, _)| at + 1));
        self.rest = rest;
        text
    }

    fn space(&mut self) {
        let end = self.rest.find(|c: char| !matches!(c, ' ' | '\n' | '\r' | '\t')).unwrap_or(self.rest.len());
        let (space, rest) = self.rest.split_at(end);
        self.rest = rest;
        let indentation = space.strip_prefix('\r').unwrap_or(space).strip_prefix('\n');
        let is_indented = indentation.is_some_and(|blanks| {
            blanks.len() <= MAX_INDENTATION && blanks.bytes().all(|blank| matches!(blank, b' ' | b'\t'))
        });
        if !is_indented && !matches!(space, "" | " ") {
            self.flaws.push(Flaw::WhiteSpace);
        }
    }

    fn take(&mut self, bytes: usize) {
        self.rest = self.rest.get(bytes..).unwrap_or_default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_spellings_within_the_accepted_set_have_no_flaw() {
        let schema = json!({"properties": {"a": {"type": "integer"}, "b": {"enum": ["x"]}, "c": {"items": {"properties":
            {"d": {}, "e": {}}}}, "t": {"type": "string"}}});
        let deep = format!("{{\n{}\"a\": 1}}", " ".repeat(20));
        let deeper = format!("{{\n{}\"a\": 1}}", " ".repeat(21));
        for (text, expected) in [
            (r#"{"a":1,"b":"x"}"#, None),
            (r#"{"a": 1.0, "b": "x", "c": [{"d": 1, "e": 2}, {}]}"#, None),
            ("{\n  \"a\": 1,\n  \"c\": [\n    {\n      \"d\": []\n    }\n  ]\n}", None),
            (r#"{"t": "\u00e9 , \" }", "z": 1, "y": 2}"#, None),
            (" {\"a\": 1}\r\n\t", None),
            (&deep, None),
            (&deeper, Some(Flaw::WhiteSpace)),
            ("{\"a\":  1}", Some(Flaw::WhiteSpace)),
            ("{\t\"a\": 1}", Some(Flaw::WhiteSpace)),
            ("{\"a\": 1}\n\n", Some(Flaw::WhiteSpace)),
            ("{\n\n\"a\": 1}", Some(Flaw::WhiteSpace)),
            (r#"{"\u0061": 1}"#, Some(Flaw::Escape)),
            (r#"{"b": "\u0078"}"#, Some(Flaw::Escape)),
            (r#"{"b": "x", "a": 1}"#, Some(Flaw::KeyOrder)),
            (r#"{"a": 1, "a": 1}"#, Some(Flaw::KeyOrder)),
            (r#"{"z": 1, "a": 1}"#, Some(Flaw::KeyOrder)),
            (r#"{"c": [{"e": 1, "d": 1}]}"#, Some(Flaw::KeyOrder)),
            (r#"{"b": "\u0078",  "a": 1}"#, Some(Flaw::WhiteSpace)),
        ] {
            serde_json::from_str::<Value>(text).expect("JSON");
            assert_eq!(flaw(text, &schema), expected, "{text}");
        }
    }
}
