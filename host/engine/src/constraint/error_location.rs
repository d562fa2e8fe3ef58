//! The location in a schema that causes an error of the compiler, which does not report it.
//!
//! A subschema that draws the same error on its own is the location. Subschemas that refer to more than
//! definitions may draw a different error on their own; then the location is the schema around them, which
//! is correct as well.

use serde_json::{Map, Value};

use super::canonical::children;

/// Maximum number of subschemas that are tried; a schema may have thousands.
const MAX_TRIALS: usize = 128;

/// Returns the pointer of the innermost subschema that draws `error`, as reported by `error_of`.
pub(super) fn find(root: &Value, error: &str, error_of: impl Fn(Value) -> Option<String>) -> String {
    let (mut schema, mut at, mut trials) = (root, String::new(), 0);
    loop {
        let inner = children(schema, &at).into_iter().find(|(_, _, child)| {
            trials += 1;
            trials <= MAX_TRIALS && error_of(alone(child, root)).is_some_and(|own| own == error)
        });
        let Some((_, path, child)) = inner else { return at };
        at = path;
        schema = child;
    }
}

/// Returns the subschema as a document with the root's definitions.
fn alone(schema: &Value, root: &Value) -> Value {
    let Value::Object(members) = schema else { return schema.clone() };
    let mut document: Map<String, Value> = members.clone();
    if let Some(definitions) = root.get("$defs") {
        document.insert("$defs".to_string(), definitions.clone());
    }
    document.into()
}
