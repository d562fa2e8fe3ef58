//! Where in a schema a complaint of the compiler comes from: the compiler itself does not say.
//!
//! A subschema that draws the same complaint alone is its place. Subschemas that refer to more than definitions may
//! complain differently alone; then the place is the schema around them, which is true as well.

use serde_json::{Map, Value};

use super::schema_keywords::pointer;

/// Subschemas that are tried; a schema may have thousands.
const MAX_TRIALS: usize = 256;

/// The pointer of the innermost subschema that draws `complaint`, as `complain` tells it.
pub(super) fn place(root: &Value, complaint: &str, complain: impl Fn(Value) -> Option<String>) -> String {
    let (mut schema, mut at, mut trials) = (root, String::new(), 0);
    loop {
        let inner = children(schema).into_iter().find(|(_, child)| {
            trials += 1;
            trials <= MAX_TRIALS && complain(alone(child, root)).is_some_and(|own| own == complaint)
        });
        let Some((path, child)) = inner else { return at };
        at.push_str(&path);
        schema = child;
    }
}

/// The subschema as a document that has the root's definitions.
fn alone(schema: &Value, root: &Value) -> Value {
    let Value::Object(members) = schema else { return schema.clone() };
    let mut document: Map<String, Value> = members.clone();
    for key in ["$schema", "$defs", "definitions"] {
        if let Some(value) = root.get(key) {
            document.insert(key.to_string(), value.clone());
        }
    }
    document.into()
}

fn children(schema: &Value) -> Vec<(String, &Value)> {
    let mut found = Vec::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        let at = pointer("", key);
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(schemas)) => {
                found.extend(schemas.iter().map(|(name, schema)| (pointer(&at, name), schema)));
            }
            ("items" | "prefixItems" | "anyOf" | "oneOf" | "allOf", Value::Array(schemas)) => {
                found.extend(schemas.iter().enumerate().map(|(n, schema)| (format!("{at}/{n}"), schema)));
            }
            ("items" | "additionalItems" | "additionalProperties", schema) => found.push((at, schema)),
            _ => {}
        }
    }
    found
}
