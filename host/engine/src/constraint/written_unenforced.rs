//! The arguments that a mask does not enforce in full where they are written one by one.
//!
//! Invariant: arguments whose named values validate, and whose other values the mask allows, validate against the schema
//! of the tool.

use std::collections::HashSet;

use serde_json::Value;

use super::canonical::standing_alone;
use super::unenforced::{PathStep, UnenforcedValue};
use super::written_value::{MAX_COUNTED, followed};

/// Maximum number of arguments of a tool that are checked one by one; past it, all are checked at the end of a call.
const MAX_VALUES: usize = 64;
/// The keywords of a tool's parameters that the rule of its arguments follows.
const FOLLOWED: [&str; 6] =
    ["type", "properties", "required", "additionalProperties", "$defs", "x-key-order"];
/// The keywords of a string that its rule follows.
const FOLLOWED_IN_TEXT: [&str; 4] = ["type", "enum", "minLength", "maxLength"];

/// Names the arguments of a tool with this canonical schema, whose mask is looser at the `lost` locations.
pub(super) fn unenforced(document: &Value, lost: &HashSet<String>) -> Vec<UnenforcedValue> {
    let members = document.as_object();
    let member = |key: &str| members.and_then(|members| members.get(key));
    let named = |step: PathStep, schema: &Value| UnenforcedValue {
        tool: None,
        path: vec![step],
        schema: standing_alone(schema, document),
    };
    let mut values = Vec::new();
    let described = member("properties").and_then(Value::as_object);
    for (name, schema) in described.into_iter().flatten() {
        if !is_enforced(followed(schema, document)) {
            values.push(named(PathStep::Property(name.clone()), schema));
        }
    }
    // Arguments that the schema does not describe are written only where it describes none.
    if described.is_none_or(|described| described.is_empty())
        && let Some(schema) = member("additionalProperties").filter(|schema| schema.is_object())
    {
        values.push(named(PathStep::AnyProperty, schema));
    }
    let is_followed = |key: &String| FOLLOWED.contains(&key.as_str());
    let is_looser = lost.iter().any(|location| !location.starts_with("/properties/"));
    if values.len() > MAX_VALUES {
        values.clear();
    } else if !is_looser && members.is_some_and(|members| members.keys().all(is_followed)) {
        return values;
    }
    values.push(UnenforcedValue { tool: None, path: Vec::new(), schema: standing_alone(document, document) });
    values
}

/// Returns whether a mask allows only the values of a schema, however they are read.
fn is_enforced(schema: &Value) -> bool {
    let Some(members) = schema.as_object() else { return *schema == Value::Bool(true) };
    let has_only = |keys: &[&str]| members.keys().all(|key| keys.contains(&key.as_str()));
    match schema.get("type").and_then(Value::as_str) {
        None => members.is_empty(),
        Some("boolean") => has_only(&["type"]),
        Some("string") => {
            let is_plain = |text: &Value| text.as_str().is_some_and(|text| !text.contains('<'));
            let listed = schema.get("enum").and_then(Value::as_array);
            let is_counted = |key: &str| {
                schema.get(key).is_none_or(|count| count.as_u64().is_some_and(|n| n <= MAX_COUNTED))
            };
            has_only(&FOLLOWED_IN_TEXT)
                && listed.is_none_or(|listed| listed.iter().all(is_plain) && members.len() == 2)
                && is_counted("minLength")
                && is_counted("maxLength")
        }
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn paths(document: Value) -> Vec<String> {
        let values = unenforced(&document, &HashSet::new());
        values.into_iter().map(|value| format!("{:?}", value.path)).collect()
    }

    #[test]
    fn values_that_a_mask_enforces_are_not_named() {
        let properties = json!({"any": {}, "yes": {"type": "boolean"}, "text": {"type": "string", "maxLength": 9},
                                "color": {"$ref": "#/$defs/color"}});
        let document = json!({"type": "object", "properties": properties, "required": ["any"],
                              "additionalProperties": false, "$defs": {"color": {"type": "string", "enum": ["red", "blue"]}}});
        assert_eq!(paths(document), Vec::<String>::new());
    }

    #[test]
    fn values_and_calls_that_a_mask_does_not_enforce_are_named() {
        for (schema, expected) in [
            (json!({"properties": {"a": {"type": "integer"}}}), vec!["[Property(\"a\")]"]),
            (json!({"properties": {"a": {"type": "string", "pattern": "x"}}}), vec!["[Property(\"a\")]"]),
            (json!({"properties": {"a": {"type": "string", "maxLength": 9000}}}), vec!["[Property(\"a\")]"]),
            (json!({"additionalProperties": {"type": "integer"}}), vec!["[AnyProperty]"]),
            (json!({"properties": {"a": {}}, "minProperties": 1}), vec!["[]"]),
            (json!({"properties": {"a": {"not": {}}}, "anyOf": []}), vec!["[Property(\"a\")]", "[]"]),
        ] {
            assert_eq!(paths(schema.clone()), expected, "{schema}");
        }
    }
}
