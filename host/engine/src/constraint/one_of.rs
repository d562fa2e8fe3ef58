//! Detects a `oneOf` whose alternatives exclude each other: it is equivalent to `anyOf`, which a grammar can
//! follow.
//!
//! Invariant: alternatives count as exclusive only if no value can validate against two of them: their types
//! differ, or their constants do, or a property that one of them requires excludes the other (the tag of a
//! tagged union). References are followed. If exclusion is not detected here, the mask accepts all
//! alternatives, and the value is checked when it is complete.

use serde_json::Value;

/// Maximum nesting of schemas that are looked through.
const MAX_DEPTH: usize = 8;

/// Returns whether no value validates against two of the alternatives.
pub(super) fn is_exclusive(alternatives: &[Value], root: &Value) -> bool {
    alternatives
        .iter()
        .enumerate()
        .all(|(index, one)| alternatives[index + 1..].iter().all(|other| excludes(one, other, root, 0)))
}

/// Returns whether no value validates against both schemas.
fn excludes(one: &Value, other: &Value, root: &Value, depth: usize) -> bool {
    if depth > MAX_DEPTH {
        return false;
    }
    let (ones, others) = (conjuncts(one, root), conjuncts(other, root));
    // A value that is not an object has no properties to distinguish it by.
    let objects = types(&ones) == ["object"] && types(&others) == ["object"];
    let names = if objects { [required(&ones), required(&others)].concat() } else { Vec::new() };
    ones.iter().any(|one| {
        others.iter().any(|other| {
            one == &&Value::Bool(false)
                || other == &&Value::Bool(false)
                || constants_differ(one, other)
                || property_excludes((one, other), &names, root, depth)
        })
    }) || disjoint(&types(&ones), &types(&others))
        || alternatives_exclude(&ones, other, root, depth)
        || alternatives_exclude(&others, one, root, depth)
}

/// Returns the schema, the schemas that it refers to, and the members of `allOf`: all of them must hold.
fn conjuncts<'a>(schema: &'a Value, root: &'a Value) -> Vec<&'a Value> {
    let mut found = vec![schema];
    let mut next = 0;
    while let Some(schema) = found.get(next).copied().filter(|_| next < MAX_DEPTH) {
        next += 1;
        let reference = schema.get("$ref").and_then(Value::as_str).and_then(|to| to.strip_prefix('#'));
        found.extend(reference.and_then(|to| root.pointer(to)));
        found.extend(schema.get("allOf").and_then(Value::as_array).into_iter().flatten());
    }
    found
}

/// Returns the only types that a value may have. Integers count as numbers.
fn types(conjuncts: &[&Value]) -> Vec<&'static str> {
    let mut possible = vec!["null", "boolean", "number", "string", "array", "object"];
    for schema in conjuncts {
        let said: Option<Vec<&str>> = match (schema.get("type"), constants(schema)) {
            (Some(Value::String(kind)), _) => Some(vec![kind]),
            (Some(Value::Array(kinds)), _) => Some(kinds.iter().filter_map(Value::as_str).collect()),
            (_, Some(values)) => Some(values.into_iter().map(type_of).collect()),
            _ => None,
        };
        if let Some(said) = said {
            possible.retain(|kind| said.contains(kind) || *kind == "number" && said.contains(&"integer"));
        }
    }
    possible
}

fn type_of(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "boolean",
        Value::Number(_) => "number",
        Value::String(_) => "string",
        Value::Array(_) => "array",
        Value::Object(_) => "object",
    }
}

fn disjoint(ones: &[&str], others: &[&str]) -> bool {
    ones.iter().all(|kind| !others.contains(kind))
}

fn constants(schema: &Value) -> Option<Vec<&Value>> {
    match (schema.get("const"), schema.get("enum")) {
        (Some(value), _) => Some(vec![value]),
        (_, Some(Value::Array(values))) => Some(values.iter().collect()),
        _ => None,
    }
}

fn constants_differ(one: &Value, other: &Value) -> bool {
    let (Some(ones), Some(others)) = (constants(one), constants(other)) else { return false };
    ones.iter().all(|one| others.iter().all(|other| surely_differ(one, other)))
}

/// Returns whether two values certainly differ. 1 and 1.0 are the same number; values that may contain numbers
/// are not looked into.
fn surely_differ(one: &Value, other: &Value) -> bool {
    match (one, other) {
        (Value::Number(one), Value::Number(other)) => one.as_f64() != other.as_f64(),
        (Value::Array(_), Value::Array(_)) | (Value::Object(_), Value::Object(_)) => false,
        _ => one != other,
    }
}

/// Returns whether some property that is always present cannot satisfy both schemas.
fn property_excludes((one, other): (&Value, &Value), required: &[&str], root: &Value, depth: usize) -> bool {
    required.iter().any(|name| match (property(one, name), property(other, name)) {
        (Property::Forbidden, _) | (_, Property::Forbidden) => true,
        (Property::Is(one), Property::Is(other)) => excludes(one, other, root, depth + 1),
        _ => false,
    })
}

/// A schema's statement about a property.
enum Property<'a> {
    Is(&'a Value),
    Forbidden,
    Unknown,
}

fn property<'a>(schema: &'a Value, name: &str) -> Property<'a> {
    match schema.get("properties").and_then(|properties| properties.get(name)) {
        Some(property) => Property::Is(property),
        None if schema.get("additionalProperties") == Some(&Value::Bool(false))
            && schema.get("patternProperties").is_none() =>
        {
            Property::Forbidden
        }
        None => Property::Unknown,
    }
}

fn required<'a>(conjuncts: &[&'a Value]) -> Vec<&'a str> {
    let lists = conjuncts.iter().filter_map(|schema| schema.get("required")?.as_array());
    lists.flatten().filter_map(Value::as_str).collect()
}

/// Returns whether one of `conjuncts` is a choice of which every alternative excludes `other`.
fn alternatives_exclude(conjuncts: &[&Value], other: &Value, root: &Value, depth: usize) -> bool {
    conjuncts.iter().any(|schema| {
        ["anyOf", "oneOf"].iter().filter_map(|key| schema.get(*key)?.as_array()).any(|alternatives| {
            alternatives.iter().all(|alternative| excludes(alternative, other, root, depth + 1))
        })
    })
}
