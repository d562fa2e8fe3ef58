//! JSON Schemas of Rust types, in the plain subset that constrained decoding can follow, and parsing of
//! values that a model wrote.
//!
//! The schemas leave out everything that a grammar cannot enforce or that a small model should not have to
//! read: number formats, titles, the URI of the dialect. Everything that narrows a value stays: ranges,
//! lengths, enumerations, required properties.

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde::de::DeserializeOwned;
use serde_json::Value;

/// String formats that constrained decoding supports; any other would make a schema unusable.
const ENFORCEABLE_FORMATS: [&str; 9] =
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"];

/// Up to this value an `f64` represents every integer exactly.
const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;

/// Returns the schema of JSON that deserializes into a `T`.
pub fn input_schema<T: JsonSchema>() -> Value {
    generate::<T>(SchemaSettings::draft2020_12().for_deserialize())
}

/// Returns the schema of JSON that a `T` serializes to.
pub fn output_schema<T: JsonSchema>() -> Value {
    generate::<T>(SchemaSettings::draft2020_12().for_serialize())
}

/// Deserializes a `T` from JSON that a model wrote. JSON Schema counts `1.0` as an integer and Rust does not,
/// so if the value does not fit unchanged, whole numbers are read as integers.
pub fn from_model<T: DeserializeOwned>(mut value: Value) -> Result<T, serde_json::Error> {
    T::deserialize(&value).or_else(|error| {
        whole_numbers_as_integers(&mut value);
        T::deserialize(&value).map_err(|_| error)
    })
}

fn whole_numbers_as_integers(value: &mut Value) {
    match value {
        Value::Number(number) => {
            if let Some(whole) = number.as_f64().filter(|n| n.fract() == 0.0 && n.abs() < LARGEST_EXACT) {
                *value = Value::from(whole as i64);
            }
        }
        Value::Array(items) => items.iter_mut().for_each(whole_numbers_as_integers),
        Value::Object(members) => members.values_mut().for_each(whole_numbers_as_integers),
        Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

fn generate<T: JsonSchema>(mut settings: SchemaSettings) -> Value {
    settings.inline_subschemas = true; // a small model copes better with repetition than with references
    settings.meta_schema = None;
    settings.with_transform(Simplify).into_generator().into_root_schema_for::<T>().to_value()
}

#[derive(Debug, Clone)]
struct Simplify;

impl Transform for Simplify {
    fn transform(&mut self, schema: &mut Schema) {
        transform_subschemas(self, schema);
        let Some(object) = schema.as_object_mut() else { return };
        if object.get("title").is_some_and(Value::is_string) {
            object.remove("title");
        }
        if let Some(Value::String(format)) = object.get("format")
            && !ENFORCEABLE_FORMATS.contains(&format.as_str())
        {
            object.remove("format");
        }
        object.remove("uniqueItems"); // a set drops duplicates
        if let Some(alternatives) = object.remove("oneOf") {
            match enumeration(&alternatives) {
                Some(values) => {
                    object.insert("type".into(), "string".into());
                    object.insert("enum".into(), values);
                }
                // The alternatives of an enum exclude one another, so "one of" and "any of" mean the same.
                None => {
                    object.insert("anyOf".into(), alternatives);
                }
            }
        }
    }
}

/// Converts `oneOf` string constants, as schemars generates them for documented variants, to the values of an
/// `enum`.
fn enumeration(alternatives: &Value) -> Option<Value> {
    let mut values = Vec::new();
    for alternative in alternatives.as_array()? {
        match (alternative.get("const"), alternative.get("enum").and_then(Value::as_array)) {
            (Some(value), _) if value.is_string() => values.push(value.clone()),
            (None, Some(several)) if several.iter().all(Value::is_string) => {
                values.extend(several.iter().cloned())
            }
            _ => return None,
        }
    }
    Some(Value::Array(values))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::{Deserialize, Serialize};
    use serde_json::json;

    #[test]
    fn whole_numbers_from_a_model_parse_as_integers() {
        #[derive(Debug, Deserialize, PartialEq)]
        struct Line {
            count: u8,
            price: f32,
        }
        let line = |count: Value| from_model::<Line>(json!({"count": count, "price": 2.0}));
        assert_eq!(line(json!(3.0)).unwrap(), Line { count: 3, price: 2.0 });
        assert_eq!(line(json!(3)).unwrap(), Line { count: 3, price: 2.0 });
        for count in [json!(3.5), json!(300.0), json!("3")] {
            assert!(line(count.clone()).is_err(), "{count}");
        }
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(rename_all = "snake_case")]
    enum Room {
        /// One bed.
        Single,
        Double,
        /// Two rooms.
        Suite,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(deny_unknown_fields)]
    struct Stay {
        room: Room,
        #[schemars(range(min = 1, max = 14))]
        nights: u32,
        note: Option<String>,
        title: String,
    }

    #[derive(Serialize, Deserialize, JsonSchema)]
    #[serde(tag = "kind", rename_all = "snake_case")]
    enum Wish {
        Towels { count: u8 },
        Call { at: String },
    }

    #[test]
    fn number_formats_are_removed_and_ranges_kept() {
        let schema = input_schema::<Stay>();
        assert_eq!(schema["properties"]["nights"], json!({"type": "integer", "minimum": 1, "maximum": 14}));
        assert!(schema.get("title").is_none() && schema.get("$schema").is_none());
        assert_eq!(schema["properties"]["title"], json!({"type": "string"}), "a property called title stays");
    }

    #[test]
    fn documented_variants_are_an_enumeration() {
        let schema = input_schema::<Stay>();
        let mut values = schema["properties"]["room"]["enum"].as_array().unwrap().clone();
        values.sort_by_key(Value::to_string);
        assert_eq!(values, [json!("double"), json!("single"), json!("suite")]);
    }

    #[test]
    fn options_are_not_required_and_unknown_properties_are_refused() {
        let schema = input_schema::<Stay>();
        assert_eq!(schema["required"], json!(["room", "nights", "title"]));
        assert_eq!(schema["additionalProperties"], json!(false));
    }

    #[test]
    fn tagged_enums_are_alternatives_of_objects() {
        let schema = input_schema::<Wish>();
        assert_eq!(schema["anyOf"].as_array().unwrap().len(), 2);
        assert_eq!(schema["anyOf"][0]["properties"]["kind"]["const"], "towels");
    }
}
