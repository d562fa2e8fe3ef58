//! A schema as the compiler gets it: only keywords that assert something, in an order that the compiler does not read
//! more into than the standard does.
//!
//! Invariant: whatever validates against the result validates against the schema. It holds for a schema that
//! `schema_keywords` let through.

use serde_json::{Map, Value, json};

use super::{one_of, schema_keywords};

/// Keywords that bring in whole schemas. The compiler intersects them with what stands before them, so they come last:
/// `additionalProperties` must not be read without the `patternProperties` that it goes with.
const APPLICATORS: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];

/// Up to here a float holds every whole number.
const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;

pub(super) fn normalise(schema: &Value) -> Value {
    let mut schema = schema.clone();
    one_of::settle(&mut schema);
    tidied(&schema)
}

fn tidied(schema: &Value) -> Value {
    let Value::Object(members) = schema else { return schema.clone() };
    let (mut plain, mut applied) = (Map::new(), Map::new());
    for (key, value) in members {
        if key != "$schema" && schema_keywords::asserts_nothing(key, value, members) {
            continue;
        }
        let value = match key.as_str() {
            "properties" | "patternProperties" | "$defs" | "definitions" => each_member(value),
            "items"
            | "additionalItems"
            | "additionalProperties"
            | "prefixItems"
            | "allOf"
            | "anyOf"
            | "oneOf" => each_item(value),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => exact_bound(key, value),
            _ => value.clone(),
        };
        let order = if APPLICATORS.contains(&key.as_str()) { &mut applied } else { &mut plain };
        order.insert(key.clone(), value);
    }
    bound_numbers(&mut plain);
    plain.extend(applied);
    Value::Object(plain)
}

fn each_member(schemas: &Value) -> Value {
    match schemas {
        Value::Object(members) => {
            members.iter().map(|(name, schema)| (name.clone(), tidied(schema))).collect::<Map<_, _>>().into()
        }
        other => other.clone(),
    }
}

/// One schema, or a list of them.
fn each_item(schemas: &Value) -> Value {
    match schemas {
        Value::Array(items) => items.iter().map(tidied).collect(),
        schema => tidied(schema),
    }
}

/// An integer has 64 bits, and a multiple of something is one after it was read as a float too. Without a bound a
/// model may also write digits for ever.
fn bound_numbers(members: &mut Map<String, Value>) {
    let says = |kind: &str| match members.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|said| said == kind),
        said => said.is_some_and(|said| said == kind),
    };
    let largest = match (says("number"), members.contains_key("multipleOf")) {
        (true, true) => LARGEST_EXACT,
        (false, _) if says("integer") => schema_keywords::LARGEST_BOUND,
        _ => return,
    };
    for (key, exclusive, bound) in
        [("minimum", "exclusiveMinimum", -largest), ("maximum", "exclusiveMaximum", largest)]
    {
        if !members.contains_key(key) && !members.contains_key(exclusive) {
            members.insert(key.to_string(), json!(bound));
        }
    }
}

/// A bound that the compiler, which reads 64-bit floats and computes in 64-bit integers, cannot round outward.
fn exact_bound(key: &str, value: &Value) -> Value {
    let Some(bound) = value.as_f64() else { return value.clone() };
    if bound.abs() < LARGEST_EXACT {
        return value.clone();
    }
    // Past 2^53 one float in may be several numbers in: stricter than asked, never looser.
    let inward = if key.ends_with("inimum") { bound.next_up() } else { bound.next_down() };
    json!(inward.clamp(-schema_keywords::LARGEST_BOUND, schema_keywords::LARGEST_BOUND))
}
