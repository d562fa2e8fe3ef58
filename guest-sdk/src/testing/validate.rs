//! Validates a value against a schema that this crate generated.
//!
//! It covers the keywords that `schema` produces, so that tests need no validator. The host validates with a
//! complete one. Other keywords (`pattern`, `format`) are not checked.

use serde_json::{Map, Value};

/// Checks that `value` validates. The error says where and why it does not.
pub fn validate(schema: &Value, value: &Value) -> Result<(), String> {
    Validator { root: schema }.check(schema, value, "")
}

struct Validator<'a> {
    root: &'a Value,
}

impl Validator<'_> {
    fn check(&self, schema: &Value, value: &Value, at: &str) -> Result<(), String> {
        let schema = match schema {
            Value::Bool(true) => return Ok(()),
            Value::Bool(false) => return Err(format!("{} is not allowed", place(at))),
            Value::Object(schema) => schema,
            _ => return Err(format!("{}: the schema is neither an object nor a boolean", place(at))),
        };
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            let target = reference.strip_prefix('#').and_then(|pointer| self.root.pointer(pointer));
            self.check(
                target.ok_or_else(|| format!("the schema has an unresolved reference: {reference}"))?,
                value,
                at,
            )?;
        }
        self.check_kind(schema, value, at)?;
        self.check_alternatives(schema, value, at)?;
        match value {
            Value::Object(object) => self.check_object(schema, object, at),
            Value::Array(items) => self.check_array(schema, items, at),
            Value::String(text) => {
                check_bounds(schema, ["minLength", "maxLength"], text.chars().count() as f64, at)
            }
            Value::Number(number) => {
                check_bounds(schema, ["minimum", "maximum"], number.as_f64().unwrap_or(f64::NAN), at)
            }
            _ => Ok(()),
        }
    }

    fn check_kind(&self, schema: &Map<String, Value>, value: &Value, at: &str) -> Result<(), String> {
        let kinds: Vec<&str> = match schema.get("type") {
            Some(Value::String(kind)) => vec![kind],
            Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        if !kinds.is_empty() && !kinds.iter().any(|kind| is_kind(value, kind)) {
            return Err(format!("{} is {value}, not {}", place(at), kinds.join(" or ")));
        }
        if let Some(constant) = schema.get("const")
            && constant != value
        {
            return Err(format!("{} is {value}, not {constant}", place(at)));
        }
        match schema.get("enum").and_then(Value::as_array) {
            Some(known) if !known.contains(value) => {
                let known: Vec<String> = known.iter().map(Value::to_string).collect();
                Err(format!("{} is {value}, not one of {}", place(at), known.join(", ")))
            }
            _ => Ok(()),
        }
    }

    fn check_alternatives(&self, schema: &Map<String, Value>, value: &Value, at: &str) -> Result<(), String> {
        for all in schema.get("allOf").and_then(Value::as_array).into_iter().flatten() {
            self.check(all, value, at)?;
        }
        for keyword in ["anyOf", "oneOf"] {
            let Some(alternatives) = schema.get(keyword).and_then(Value::as_array) else { continue };
            let misfits: Vec<String> =
                alternatives.iter().map_while(|schema| self.check(schema, value, at).err()).collect();
            if misfits.len() == alternatives.len() {
                return Err(format!("{} fits none of the alternatives: {}", place(at), misfits.join("; ")));
            }
        }
        Ok(())
    }

    fn check_object(
        &self,
        schema: &Map<String, Value>,
        object: &Map<String, Value>,
        at: &str,
    ) -> Result<(), String> {
        for required in schema.get("required").and_then(Value::as_array).into_iter().flatten() {
            let name = required.as_str().unwrap_or_default();
            if !object.contains_key(name) {
                return Err(format!("{}/{name} is missing", at));
            }
        }
        let properties = schema.get("properties").and_then(Value::as_object);
        for (name, value) in object {
            let at = format!("{at}/{name}");
            match (properties.and_then(|properties| properties.get(name)), schema.get("additionalProperties"))
            {
                (Some(property), _) => self.check(property, value, &at)?,
                (None, Some(additional)) => self.check(additional, value, &at)?,
                (None, None) => {}
            }
        }
        Ok(())
    }

    fn check_array(&self, schema: &Map<String, Value>, items: &[Value], at: &str) -> Result<(), String> {
        check_bounds(schema, ["minItems", "maxItems"], items.len() as f64, at)?;
        let prefix =
            schema.get("prefixItems").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        for (index, item) in items.iter().enumerate() {
            if let Some(schema) = prefix.get(index).or(schema.get("items")) {
                self.check(schema, item, &format!("{at}/{index}"))?;
            }
        }
        Ok(())
    }
}

fn check_bounds(
    schema: &Map<String, Value>,
    [min, max]: [&str; 2],
    size: f64,
    at: &str,
) -> Result<(), String> {
    let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_f64);
    match (bound(min), bound(max)) {
        (Some(bound), _) if size < bound => Err(format!("{}: {size} is below {min} {bound}", place(at))),
        (_, Some(bound)) if size > bound => Err(format!("{}: {size} is above {max} {bound}", place(at))),
        _ => Ok(()),
    }
}

fn is_kind(value: &Value, kind: &str) -> bool {
    match kind {
        "null" => value.is_null(),
        "boolean" => value.is_boolean(),
        "string" => value.is_string(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        "number" => value.is_number(),
        "integer" => {
            value.is_i64() || value.is_u64() || value.as_f64().is_some_and(|number| number.fract() == 0.0)
        }
        _ => false,
    }
}

fn place(at: &str) -> &str {
    if at.is_empty() { "the value" } else { at }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn errors_name_their_position() {
        let schema = json!({
            "type": "object",
            "properties": {
                "room": {"type": "string", "enum": ["single", "double"]},
                "nights": {"type": "integer", "minimum": 1},
                "guests": {"type": "array", "maxItems": 2, "items": {"type": "string", "maxLength": 3}},
                "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
            },
            "required": ["room"],
            "additionalProperties": false,
        });
        for (value, expected) in [
            (json!({"room": "single", "next": {"room": "double", "next": null}}), None),
            (json!({"nights": 1}), Some("/room is missing")),
            (json!({"room": "attic"}), Some("/room is \"attic\"")),
            (json!({"room": "single", "nights": 0}), Some("below minimum 1")),
            (json!({"room": "single", "nights": 1.5}), Some("/nights is 1.5, not integer")),
            (json!({"room": "single", "guests": ["Ann", "Barbara"]}), Some("/guests/1: 7 is above")),
            (json!({"room": "single", "guests": ["a", "b", "c"]}), Some("above maxItems 2")),
            (json!({"room": "single", "pets": 1}), Some("/pets is not allowed")),
            (json!({"room": "single", "next": {"room": 1}}), Some("/next fits none of the alternatives")),
            (json!([]), Some("not object")),
        ] {
            match (validate(&schema, &value), expected) {
                (Ok(()), None) => {}
                (Err(why), Some(expected)) => assert!(why.contains(expected), "{value}: {why}"),
                (outcome, _) => panic!("{value}: {outcome:?}"),
            }
        }
    }
}
