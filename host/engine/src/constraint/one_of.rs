//! llguidance accepts `oneOf` where it can see that the alternatives exclude each other, but does not look through
//! references. Tagged enums in `$defs` are written just so, hence references that are alternatives are replaced by
//! what they refer to. Nothing else changes, and what is still not visibly exclusive is refused by the compiler.

use serde_json::Value;

/// Replaces `{"$ref": "#/…"}` among the alternatives of every `oneOf`, one level deep.
pub(super) fn inline_alternatives(schema: &mut Value) {
    let root = schema.clone();
    visit(schema, &root);
}

fn visit(value: &mut Value, root: &Value) {
    match value {
        Value::Array(items) => items.iter_mut().for_each(|item| visit(item, root)),
        Value::Object(members) => {
            members.values_mut().for_each(|member| visit(member, root));
            let Some(Value::Array(alternatives)) = members.get_mut("oneOf") else { return };
            for alternative in alternatives {
                if let Some(target) = local_target(alternative, root) {
                    *alternative = target.clone();
                }
            }
        }
        _ => {}
    }
}

/// What an alternative that is only a reference (and perhaps a description) refers to within the document.
fn local_target<'a>(alternative: &Value, root: &'a Value) -> Option<&'a Value> {
    let members = alternative.as_object()?;
    if members.keys().any(|key| !matches!(key.as_str(), "$ref" | "description" | "title")) {
        return None;
    }
    let target = root.pointer(members.get("$ref")?.as_str()?.strip_prefix('#')?)?;
    // A document with several bases means something else by "#".
    (root.get("$id").is_none() && target.get("$id").is_none()).then_some(target)
}
