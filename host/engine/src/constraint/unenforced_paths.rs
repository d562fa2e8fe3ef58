//! The values of an output that its mask does not enforce in full, named by their paths.
//!
//! Invariant: every location at which the mask is looser than the schema lies within a named value, and the
//! schema of a named value holds for every value that its path leads to. If no plain steps lead to a location
//! (it is in one of several alternatives, or in a schema that contains itself), the nearest value around it is
//! named.

use std::collections::HashSet;
use std::sync::Arc;

use serde_json::Value;

use super::canonical::{children, standing_alone, target};
use super::relaxed::cycles;
use super::unenforced::{PathStep, UnenforcedValue};
use crate::json_pointer;

/// Maximum number of named values; past it, the whole document is checked at its end.
const MAX_VALUES: usize = 64;
/// Maximum number of schemas that are visited.
const MAX_VISITS: usize = 20_000;
/// Maximum total size of the schemas of the named values.
const MAX_SCHEMA_BYTES: usize = 1 << 20;

/// Names the values that the `lost` locations of the canonical document affect.
pub(super) fn unenforced(document: &Value, lost: &HashSet<String>) -> Arc<[UnenforcedValue]> {
    if lost.is_empty() {
        return Arc::new([]);
    }
    let mut walk = Walk { document, lost, cycles: cycles(document), named: Vec::new(), visits: 0 };
    let root = Anchor { path: Vec::new(), at: String::new() };
    let is_cyclic = walk.cycles.contains("#");
    walk.visit(document, "", &root, is_cyclic);
    let mut values = Vec::new();
    let mut bytes = 0;
    let fits = walk.visits <= MAX_VISITS && walk.named.len() <= MAX_VALUES;
    for anchor in walk.named.iter().filter(|_| fits) {
        let part = document.pointer(&anchor.at).unwrap_or(document);
        let schema = standing_alone(part, document);
        bytes += schema.to_string().len();
        values.push(UnenforcedValue { tool: None, path: anchor.path.clone(), schema });
        if bytes > MAX_SCHEMA_BYTES {
            break;
        }
    }
    if !fits || bytes > MAX_SCHEMA_BYTES {
        values = vec![UnenforcedValue {
            tool: None,
            path: Vec::new(),
            schema: standing_alone(document, document),
        }];
    }
    // A value within another value that is checked too is checked with it.
    let covered =
        |value: &UnenforcedValue| value.path.is_empty() && value.schema == standing_alone(document, document);
    if let Some(whole) = values.iter().position(covered) {
        values = vec![values.swap_remove(whole)];
    }
    values.into()
}

/// A value that can be named, and the location of its schema.
#[derive(Clone, PartialEq)]
struct Anchor {
    path: Vec<PathStep>,
    at: String,
}

struct Walk<'a> {
    document: &'a Value,
    lost: &'a HashSet<String>,
    cycles: HashSet<String>,
    named: Vec<Anchor>,
    visits: usize,
}

impl Walk<'_> {
    /// Visits a schema. `hidden` means that no plain steps lead from the anchor to the values within the
    /// schema.
    fn visit(&mut self, schema: &Value, at: &str, anchor: &Anchor, hidden: bool) {
        self.visits += 1;
        if self.visits > MAX_VISITS || self.named.len() > MAX_VALUES {
            return;
        }
        if self.lost.contains(at) && !self.named.contains(anchor) {
            self.named.push(anchor.clone());
        }
        if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
            self.follow(reference, anchor, hidden);
        }
        let has = |key: &str| schema.get(key).is_some();
        for (key, location, child) in children(schema, at) {
            let step = match key {
                "properties" => {
                    location.rsplit('/').next().map(|name| PathStep::Property(json_pointer::unescape(name)))
                }
                // The schema that all members have in common is known only where nothing else is described.
                "additionalProperties" if !has("properties") && !has("patternProperties") => {
                    Some(PathStep::AnyProperty)
                }
                "items" if !has("prefixItems") => Some(PathStep::AnyItem),
                "prefixItems" => {
                    location.rsplit('/').next().and_then(|index| index.parse().ok()).map(PathStep::Item)
                }
                _ => None,
            };
            match (key, step) {
                // A schema in `allOf` describes the same value.
                ("allOf", _) if !hidden => {
                    let beside = Anchor { path: anchor.path.clone(), at: location.clone() };
                    self.visit(child, &location, &beside, false);
                }
                ("properties" | "additionalProperties" | "items" | "prefixItems", Some(step)) if !hidden => {
                    let mut path = anchor.path.clone();
                    path.push(step);
                    self.visit(child, &location, &Anchor { path, at: location.clone() }, false);
                }
                (
                    "properties"
                    | "additionalProperties"
                    | "items"
                    | "prefixItems"
                    | "patternProperties"
                    | "allOf"
                    | "anyOf"
                    | "oneOf",
                    _,
                ) => self.visit(child, &location, anchor, true),
                // Definitions are visited where they are referred to; the other keywords are not compiled.
                _ => {}
            }
        }
    }

    fn follow(&mut self, reference: &str, anchor: &Anchor, hidden: bool) {
        let at = target(reference).to_string();
        let Some(schema) = self.document.pointer(&at) else { return };
        if !self.cycles.contains(reference) {
            // The referenced schema gets an anchor with the same path. The anchor of the reference itself
            // covers its siblings.
            let location = Anchor { path: anchor.path.clone(), at: at.clone() };
            let anchor = if hidden { anchor } else { &location };
            return self.visit(schema, &at, anchor, hidden);
        }
        // Anything that is lost in the cycle can be anywhere within the value.
        let mut seen = HashSet::new();
        if self.loses_something(reference, &mut seen) && !self.named.contains(anchor) {
            self.named.push(anchor.clone());
        }
    }

    fn loses_something(&mut self, reference: &str, seen: &mut HashSet<String>) -> bool {
        if !seen.insert(reference.to_string()) {
            return false;
        }
        let at = target(reference).to_string();
        let document = self.document;
        document.pointer(&at).is_some_and(|schema| self.loses_within(schema, &at, seen))
    }

    fn loses_within(&mut self, schema: &Value, at: &str, seen: &mut HashSet<String>) -> bool {
        let refers = schema.get("$ref").and_then(Value::as_str);
        self.lost.contains(at)
            || refers.is_some_and(|reference| self.loses_something(reference, seen))
            || children(schema, at)
                .iter()
                .any(|(key, location, child)| *key != "$defs" && self.loses_within(child, location, seen))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn named(document: &Value, lost: &[&str]) -> Vec<(Vec<PathStep>, Value)> {
        let lost = lost.iter().map(|at| at.to_string()).collect();
        unenforced(document, &lost).iter().map(|value| (value.path.clone(), value.schema.clone())).collect()
    }

    #[test]
    fn plain_steps_name_a_value_and_alternatives_name_the_value_around_it() {
        let unique = json!({"type": "array", "uniqueItems": true});
        let document = json!({
            "properties": {
                "a/b": unique,
                "list": {"items": {"$ref": "#/$defs/tags"}},
                "choice": {"anyOf": [{"type": "null"}, {"properties": {"x": unique}}]},
                "map": {"additionalProperties": unique},
                "mixed": {"properties": {"y": true}, "additionalProperties": unique},
            },
            "$defs": {"tags": {"prefixItems": [unique]}},
        });
        let lost = [
            "/properties/a~1b",
            "/$defs/tags/prefixItems/0",
            "/properties/choice/anyOf/1/properties/x",
            "/properties/map/additionalProperties",
            "/properties/mixed/additionalProperties",
        ];
        let property = |name: &str| PathStep::Property(name.to_string());
        let paths: Vec<Vec<PathStep>> = named(&document, &lost).into_iter().map(|(path, _)| path).collect();
        assert_eq!(
            paths,
            [
                vec![property("a/b")],
                vec![property("list"), PathStep::AnyItem, PathStep::Item(0)],
                vec![property("choice")],
                vec![property("map"), PathStep::AnyProperty],
                vec![property("mixed")],
            ]
        );
    }

    #[test]
    fn a_schema_that_contains_itself_is_checked_as_a_whole_with_its_definitions() {
        let document = json!({
            "properties": {"tree": {"$ref": "#/$defs/node"}, "other": true},
            "$defs": {
                "node": {"properties": {"children": {"items": {"$ref": "#/$defs/node"}, "uniqueItems": true}}},
                "unused": {"type": "null"},
            },
        });
        let found = named(&document, &["/$defs/node/properties/children"]);
        assert_eq!(found.len(), 1);
        let (path, schema) = &found[0];
        assert_eq!(path, &[PathStep::Property("tree".to_string())]);
        assert_eq!(schema["$ref"], "#/$defs/node");
        assert!(schema["$defs"].get("node").is_some() && schema["$defs"].get("unused").is_none());
        let validator = jsonschema::validator_for(schema).unwrap();
        assert!(validator.is_valid(&json!({"children": [{"children": [1, 2]}]})));
        assert!(!validator.is_valid(&json!({"children": [{"children": [1, 1]}]})));
    }

    #[test]
    fn a_document_without_losses_names_no_values() {
        assert!(named(&json!({"properties": {"a": true}}), &[]).is_empty());
    }

    #[test]
    fn too_many_values_become_one_check_of_the_whole() {
        let properties: serde_json::Map<String, Value> =
            (0..100).map(|n| (format!("p{n}"), json!({"uniqueItems": true}))).collect();
        let document = json!({"properties": properties});
        let lost: Vec<String> = (0..100).map(|n| format!("/properties/p{n}")).collect();
        let lost: Vec<&str> = lost.iter().map(String::as_str).collect();
        let found = named(&document, &lost);
        assert_eq!(found.iter().map(|(path, _)| path.len()).collect::<Vec<_>>(), [0]);
        assert_eq!(found[0].1["properties"], document["properties"]);
    }
}
