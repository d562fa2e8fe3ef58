//! JSON Schemas of Rust types, in the plain subset that constrained decoding can follow.
//!
//! What a grammar cannot enforce or a small model should not have to read is taken out: number formats, titles, the
//! dialect's address. What narrows a value stays: ranges, lengths, enumerations, required properties.

use schemars::generate::SchemaSettings;
use schemars::transform::{Transform, transform_subschemas};
use schemars::{JsonSchema, Schema};
use serde_json::Value;

/// String formats that constrained decoding knows; any other would make a schema unusable.
const ENFORCEABLE_FORMATS: [&str; 9] =
    ["date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid"];

/// The schema of JSON that becomes a `T`.
pub fn input_schema<T: JsonSchema>() -> Value {
    generate::<T>(SchemaSettings::draft2020_12().for_deserialize())
}

/// The schema of JSON that a `T` becomes.
pub fn output_schema<T: JsonSchema>() -> Value {
    generate::<T>(SchemaSettings::draft2020_12().for_serialize())
}

fn generate<T: JsonSchema>(mut settings: SchemaSettings) -> Value {
    settings.inline_subschemas = true; // a reference costs a small model more than the repetition
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
        object.remove("uniqueItems"); // a set drops what is there twice
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

/// `oneOf` string constants, as documented variants give it, as the values of an `enum`.
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
    fn number_formats_go_and_ranges_stay() {
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
