//! Checks whether a schema of the cases allows a value.
//!
//! It knows the keywords that the cases use, and nothing of the grammar that the engine makes of them, so
//! that it can judge the engine's output. A keyword that it does not know is a mistake in the cases.

use serde_json::{Map, Value};

/// Keywords that are checked; any other one stops the program.
const KNOWN: [&str; 8] =
    ["type", "enum", "properties", "required", "additionalProperties", "items", "minimum", "maximum"];

/// Returns whether `value` is valid for `schema`.
pub fn conforms(value: &Value, schema: &Value) -> bool {
    let keywords = schema.as_object().expect("a schema of the cases is an object");
    for keyword in keywords.keys() {
        assert!(
            KNOWN.contains(&keyword.as_str()),
            "the cases use the keyword {keyword}, which is not checked"
        );
    }
    let of_type = schema["type"].as_str().is_none_or(|kind| is_of_type(value, kind));
    let in_enum = schema["enum"].as_array().is_none_or(|values| values.iter().any(|one| same(one, value)));
    let (number, bound) = (value.as_f64(), |name: &str| schema[name].as_f64());
    let in_bounds = number.is_none_or(|number| {
        bound("minimum").is_none_or(|least| number >= least)
            && bound("maximum").is_none_or(|most| number <= most)
    });
    of_type && in_enum && in_bounds && parts_conform(value, schema)
}

/// Returns whether two values are equal as JSON: numbers by value, properties in any order.
pub fn same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::Number(a), Value::Number(b)) => a.as_f64() == b.as_f64(),
        (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(a, b)),
        (Value::Object(a), Value::Object(b)) => {
            a.len() == b.len() && a.iter().all(|(name, a)| b.get(name).is_some_and(|b| same(a, b)))
        }
        _ => a == b,
    }
}

fn is_of_type(value: &Value, kind: &str) -> bool {
    match kind {
        "string" => value.is_string(),
        "boolean" => value.is_boolean(),
        "number" => value.is_number(),
        "integer" => value.as_f64().is_some_and(|number| number.fract() == 0.0),
        "array" => value.is_array(),
        "object" => value.is_object(),
        kind => panic!("the cases use the type {kind}, which is not checked"),
    }
}

fn parts_conform(value: &Value, schema: &Value) -> bool {
    match value {
        Value::Array(items) => {
            schema.get("items").is_none_or(|of_item| items.iter().all(|item| conforms(item, of_item)))
        }
        Value::Object(properties) => properties_conform(properties, schema),
        _ => true,
    }
}

fn properties_conform(properties: &Map<String, Value>, schema: &Value) -> bool {
    let required = schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let is_closed = schema["additionalProperties"] == Value::Bool(false);
    required.into_iter().all(|name| properties.contains_key(name))
        && properties.iter().all(|(name, value)| match schema["properties"].get(name) {
            Some(of_property) => conforms(value, of_property),
            None => !is_closed,
        })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn only_values_that_a_schema_allows_conform() {
        let schema = json!({"type": "object", "required": ["a", "b"], "additionalProperties": false, "properties": {
            "a": {"type": "integer", "minimum": 1, "maximum": 5}, "b": {"enum": ["x", "y"]},
            "c": {"type": "array", "items": {"type": "object", "properties": {"d": {"type": "boolean"}}}}}});
        for good in [json!({"b": "x", "a": 1.0}), json!({"a": 5, "b": "y", "c": [{"d": true}, {"e": 1}]})] {
            assert!(conforms(&good, &schema), "{good}");
        }
        for bad in [
            json!({"a": 1}),
            json!({"a": 6, "b": "x"}),
            json!({"a": 1.5, "b": "x"}),
            json!({"a": "1", "b": "x"}),
            json!({"a": 1, "b": "z"}),
            json!({"a": 1, "b": "x", "e": 1}),
            json!({"a": 1, "b": "x", "c": [{"d": 1}]}),
            json!([]),
        ] {
            assert!(!conforms(&bad, &schema), "{bad}");
        }
    }

    #[test]
    fn values_are_compared_and_not_their_spelling() {
        assert!(same(&json!({"a": 1, "b": [2.0]}), &json!({"b": [2], "a": 1.0})));
        assert!(!same(&json!({"a": 1}), &json!({"a": 1, "b": 1})));
        assert!(!same(&json!([1, 2]), &json!([2, 1])) && !same(&json!("1"), &json!(1)));
    }
}
