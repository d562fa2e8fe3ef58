//! The part of JSON Schema that OpenAI enforces token by token, if it is asked for `strict` output.

use serde_json::{Map, Value};

/// Keywords that strict output accepts, besides those with schemas inside.
const PLAIN: &[&str] = &[
    "type",
    "description",
    "title",
    "enum",
    "const",
    "required",
    "additionalProperties",
    "$ref",
    "$schema",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "minItems",
    "maxItems",
];

/// Returns whether a schema may be sent as `strict`: its root is an object, every object lists all its properties
/// as required and allows no others, and no other keyword occurs.
pub(super) fn is_strict(schema: &Value) -> bool {
    schema.get("type").and_then(Value::as_str) == Some("object")
        && schema.get("anyOf").is_none()
        && is_strict_part(schema)
}

fn is_strict_part(schema: &Value) -> bool {
    let Value::Object(schema) = schema else { return false };
    let describes_object = schema.get("type").is_some_and(names_object) || schema.contains_key("properties");
    schema.iter().all(|(keyword, value)| match keyword.as_str() {
        "properties" | "$defs" | "definitions" => all_strict(value.as_object().map(Map::values)),
        "items" => is_strict_part(value),
        "anyOf" => all_strict(value.as_array().map(|parts| parts.iter())),
        plain => PLAIN.contains(&plain),
    }) && (!describes_object || is_closed(schema))
}

fn names_object(kind: &Value) -> bool {
    kind == "object" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object"))
}

fn all_strict<'a>(parts: Option<impl Iterator<Item = &'a Value>>) -> bool {
    parts.is_some_and(|mut parts| parts.all(is_strict_part))
}

/// Returns whether an object has all its properties and no others.
fn is_closed(schema: &Map<String, Value>) -> bool {
    let required: Vec<&str> = match schema.get("required").and_then(Value::as_array) {
        Some(names) => names.iter().filter_map(Value::as_str).collect(),
        None => Vec::new(),
    };
    let mut properties = schema.get("properties").and_then(Value::as_object).into_iter().flat_map(Map::keys);
    schema.get("additionalProperties") == Some(&Value::Bool(false))
        && properties.all(|name| required.contains(&name.as_str()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_closed_objects_are_strict() {
        let closed = |fields: Value, required: Value| json!({"type": "object", "properties": fields, "required": required, "additionalProperties": false});
        let inner = closed(json!({"b": {"type": ["string", "null"]}}), json!(["b"]));
        assert!(is_strict(&closed(json!({"a": {"type": "array", "items": inner}}), json!(["a"]))));
        for loose in [
            json!({"type": "object", "properties": {"a": {}}, "required": ["a"]}),
            closed(json!({"a": {"type": "string"}}), json!([])),
            closed(json!({"a": {"type": "object"}}), json!(["a"])),
            closed(json!({"a": {"not": {}}}), json!(["a"])),
            json!({"type": "array", "items": {"type": "string"}}),
            json!(true),
        ] {
            assert!(!is_strict(&loose), "{loose}");
        }
    }
}
