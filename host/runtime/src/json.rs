//! JSON kept as the text in which it arrived. Code that inspects it parses values from the text and drops them again, because
//! parsed values take up to forty times the memory of their text.
//!
//! Invariant: the text is one value that `serde_json` can parse, within its nesting limit.

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{DeserializeOwned, Error as _, MapAccess, SeqAccess, Visitor},
};
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};
use std::{fmt, sync::Arc};

/// A JSON value as text. Clones share the text.
#[derive(Clone)]
pub struct Json(Arc<RawValue>);

/// A value that was parsed for validation and dropped.
struct Checked;

struct Checking;

impl Json {
    /// Returns the text as it arrived, without surrounding white space.
    pub fn get(&self) -> &str {
        self.0.get()
    }

    /// Parses the text. The value may take many times the memory of the text, so callers do not keep it.
    pub fn value(&self) -> Value {
        serde_json::from_str(self.get()).expect("the text was validated")
    }

    /// Parses the text as a `T`.
    pub fn read<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.get())
    }

    /// Serializes `value`. Fails if it cannot be represented as JSON, such as a map whose keys are not strings.
    pub(crate) fn written(value: &impl Serialize) -> Result<Self, serde_json::Error> {
        Ok(Json(to_raw_value(value)?.into()))
    }

    /// Validates `text` and wraps it.
    pub fn from_text(text: String) -> Result<Self, serde_json::Error> {
        let raw = RawValue::from_string(text)?;
        serde_json::from_str::<Checked>(raw.get())?;
        Ok(Json(raw.into()))
    }
}

/// Serializes the value without white space.
impl From<&Value> for Json {
    fn from(value: &Value) -> Self {
        Json::written(value).expect("a `Value` always serializes to JSON")
    }
}

impl From<Value> for Json {
    fn from(value: Value) -> Self {
        Json::from(&value)
    }
}

impl PartialEq for Json {
    fn eq(&self, other: &Self) -> bool {
        self.get() == other.get()
    }
}

impl Eq for Json {}

impl fmt::Debug for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.get())
    }
}

impl Serialize for Json {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.0.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <Box<RawValue>>::deserialize(deserializer)?;
        serde_json::from_str::<Checked>(raw.get()).map_err(D::Error::custom)?;
        Ok(Json(raw.into()))
    }
}

impl<'de> Deserialize<'de> for Checked {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Checking)
    }
}

impl<'de> Visitor<'de> for Checking {
    type Value = Checked;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_bool<E>(self, _: bool) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_str<E>(self, _: &str) -> Result<Checked, E> {
        Ok(Checked)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Checked, A::Error> {
        while items.next_element::<Checked>()?.is_some() {}
        Ok(Checked)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Checked, A::Error> {
        while members.next_entry::<Checked, Checked>()?.is_some() {}
        Ok(Checked)
    }
}

/// Returns whether two JSON texts are the same except for white space between tokens.
pub(crate) fn equal_ignoring_whitespace(one: &[u8], other: &[u8]) -> bool {
    without_whitespace(one).eq(without_whitespace(other))
}

/// Yields the bytes of a JSON text without white space outside of strings.
pub(crate) fn without_whitespace(text: &[u8]) -> impl Iterator<Item = u8> {
    let (mut in_string, mut escaped) = (false, false);
    text.iter().copied().filter(move |byte| {
        if !in_string {
            in_string = *byte == b'"';
            return !matches!(byte, b' ' | b'\t' | b'\n' | b'\r');
        }
        match (escaped, byte) {
            (true, _) => escaped = false,
            (false, b'\\') => escaped = true,
            (false, b'"') => in_string = false,
            _ => {}
        }
        true
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Holder {
        data: Option<Json>,
    }

    #[test]
    fn the_text_is_preserved_exactly() {
        let text = "{\"data\":{\"a\" : [1,  2.50, \"\\u00e9\"]}}";
        let holder: Holder = serde_json::from_str(text).expect("JSON");
        let data = holder.data.as_ref().expect("the field is set");
        assert_eq!(data.get(), "{\"a\" : [1,  2.50, \"\\u00e9\"]}");
        assert_eq!(data.value(), json!({"a": [1, 2.5, "é"]}));
        assert_eq!(serde_json::to_string(&holder).expect("serializes"), text);
        let from_value: Holder = serde_json::from_value(json!({"data": [1]})).expect("JSON");
        assert_eq!(from_value.data.expect("the field is set").get(), "[1]");
        let none: Holder = serde_json::from_str("{\"data\":null}").expect("JSON");
        assert_eq!(none.data, None);
        assert_eq!(serde_json::to_value(&holder).expect("a value")["data"], json!({"a": [1, 2.5, "é"]}));
    }

    #[test]
    fn rejects_text_that_does_not_parse() {
        let deep = "[".repeat(200) + &"]".repeat(200);
        for bad in ["{", "1e999", "\"\\ud800\"", "[1] 2", &deep] {
            assert!(Json::from_text(bad.to_owned()).is_err(), "{bad}");
            assert!(serde_json::from_str::<Holder>(&format!("{{\"data\":{bad}}}")).is_err(), "{bad}");
        }
    }

    #[test]
    fn white_space_counts_only_inside_strings() {
        let same = |one: &str, other: &str| equal_ignoring_whitespace(one.as_bytes(), other.as_bytes());
        assert!(same("{\"a\": [1, 2]}", "{ \"a\":[1,2]\n}"));
        assert!(!same("\"a b\"", "\"ab\""));
        assert!(!same("\"a\\\" b\"", "\"a\\\"b\""));
        assert!(same("[\"\\\\\", 1]", "[\"\\\\\",1]"));
    }
}
