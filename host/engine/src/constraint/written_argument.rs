//! Reads the value of an argument that stands between tags: a string as it is, or JSON.
//!
//! Invariant: a value that the tool's schema describes as a string is one, whatever it looks like. A value that may be
//! something else is JSON if it can be, and a string if not.

use serde_json::Value;

/// Maximum number of references that lead from one to the next, and of alternatives within each other.
const MAX_REFERENCES: usize = 16;

/// Returns the value of the argument `name` of a tool with these parameters. `is_text` is what the markup says about it.
pub(crate) fn written_argument(parameters: &Value, name: &str, is_text: Option<bool>, text: &str) -> Value {
    match is_text {
        Some(true) => Value::String(text.to_owned()),
        Some(false) => json(text).unwrap_or_else(|| Value::String(text.to_owned())),
        None => value_by_schema(parameters, name, text),
    }
}

fn value_by_schema(parameters: &Value, name: &str, text: &str) -> Value {
    let described = parameters.get("properties").and_then(|properties| properties.get(name));
    let schema = described.or_else(|| parameters.get("additionalProperties")).unwrap_or(&Value::Null);
    let types = types_of(schema, parameters, 0);
    let fits = |value: &Value| {
        types.as_ref().is_none_or(|types| {
            let kind = kind_of(value);
            types.contains(&kind) || kind == "integer" && types.contains(&"number")
        })
    };
    if types.as_ref().is_some_and(|types| types == &["string"]) {
        return Value::String(text.to_owned());
    }
    match json(text) {
        // Quoted text may be a string with quotes or JSON; schemas without types leave it open.
        Some(value) if fits(&value) => value,
        Some(value) if types.as_ref().is_some_and(|types| !types.contains(&"string")) => value,
        _ => Value::String(text.to_owned()),
    }
}

/// Reads JSON, or what Python writes in its place.
fn json(text: &str) -> Option<Value> {
    match text.trim() {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        text => serde_json::from_str(text).ok(),
    }
}

fn kind_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(number) if number.is_f64() => "number",
        Value::Number(_) => "integer",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

/// Returns the types that a schema allows; `None` if it does not say.
fn types_of<'a>(schema: &'a Value, root: &'a Value, depth: usize) -> Option<Vec<&'a str>> {
    if depth > MAX_REFERENCES {
        return None;
    }
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        return types_of(root.pointer(reference.strip_prefix('#')?)?, root, depth + 1);
    }
    if let Some(value) = schema.get("const") {
        return Some(vec![kind_of(value)]);
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let mut kinds: Vec<&str> = values.iter().map(kind_of).collect();
        kinds.dedup();
        return Some(kinds);
    }
    match schema.get("type") {
        Some(Value::String(kind)) => return Some(vec![kind.as_str()]),
        Some(Value::Array(kinds)) => return kinds.iter().map(Value::as_str).collect(),
        _ => {}
    }
    let choices = schema.get("anyOf").or_else(|| schema.get("oneOf")).and_then(Value::as_array)?;
    let mut all = Vec::new();
    for choice in choices {
        for kind in types_of(choice, root, depth + 1)? {
            if !all.contains(&kind) {
                all.push(kind);
            }
        }
    }
    Some(all)
}
