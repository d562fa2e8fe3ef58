//! Checks complete documents against the schemas of the values that their masks did not enforce.

use serde_json::Value;

use crate::constraint::{PathStep, UnenforcedValue};

/// Returns whether one of the named values does not validate against its schema.
pub fn rejects(unenforced: &[UnenforcedValue], document: &Value) -> bool {
    unenforced.iter().any(|named| {
        let validator = jsonschema::validator_for(&named.schema)
            .unwrap_or_else(|error| panic!("{error} in {}", named.schema));
        values_at(document, &named.path).into_iter().any(|value| !validator.is_valid(value))
    })
}

fn values_at<'a>(document: &'a Value, path: &[PathStep]) -> Vec<&'a Value> {
    path.iter().fold(vec![document], |values, step| {
        let next = |value: &'a Value| -> Vec<&'a Value> {
            match (step, value) {
                (PathStep::Property(name), Value::Object(members)) => members.get(name).into_iter().collect(),
                (PathStep::AnyProperty, Value::Object(members)) => members.values().collect(),
                (PathStep::Item(index), Value::Array(items)) => items.get(*index).into_iter().collect(),
                (PathStep::AnyItem, Value::Array(items)) => items.iter().collect(),
                _ => Vec::new(),
            }
        };
        values.into_iter().flat_map(next).collect()
    })
}
