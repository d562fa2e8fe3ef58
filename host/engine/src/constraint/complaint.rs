//! Where in a schema a complaint of the compiler comes from: the compiler itself does not say.
//!
//! A subschema that draws the same complaint alone is its place. Subschemas that refer to more than definitions may
//! complain differently alone; then the place is the schema around them, which is true as well.

use serde_json::{Map, Value};

use super::canonical::children;

/// Subschemas that are tried; a schema may have thousands.
const MAX_TRIALS: usize = 128;

/// The pointer of the innermost subschema that draws `complaint`, as `complain` tells it.
pub(super) fn place(root: &Value, complaint: &str, complain: impl Fn(Value) -> Option<String>) -> String {
    let (mut schema, mut at, mut trials) = (root, String::new(), 0);
    loop {
        let inner = children(schema, &at).into_iter().find(|(_, _, child)| {
            trials += 1;
            trials <= MAX_TRIALS && complain(alone(child, root)).is_some_and(|own| own == complaint)
        });
        let Some((_, path, child)) = inner else { return at };
        at = path;
        schema = child;
    }
}

/// The subschema as a document that has the root's definitions.
fn alone(schema: &Value, root: &Value) -> Value {
    let Value::Object(members) = schema else { return schema.clone() };
    let mut document: Map<String, Value> = members.clone();
    if let Some(definitions) = root.get("$defs") {
        document.insert("$defs".to_string(), definitions.clone());
    }
    document.into()
}
