//! Bounds on the schemas that are applied to one value without looking at it: `{"allOf": [A, A]}`, where A is made in the
//! same way, applies twice as many at each level, and the last ones may be `true`.
//!
//! The bound is on the schema alone. References that lead back to a part that is being applied are not followed: the library
//! looks at the value there.

use std::collections::HashMap;

use serde_json::{Map, Value};

use crate::percent_decoded;

/// Schemas that are applied without a look at the value.
const MAX_UNSEEN: usize = 100_000;
/// Schemas that are applied to the same value, one inside another.
const MAX_DEPTH: usize = 200;
/// Keywords whose values are not schemas, whatever they look like.
const DATA: [&str; 5] = ["const", "enum", "default", "examples", "dependentRequired"];
/// Keywords that apply schemas to the value itself.
const APPLIES_ONE: [&str; 4] = ["not", "if", "then", "else"];
const APPLIES_EACH: [&str; 3] = ["allOf", "anyOf", "oneOf"];
const REFERENCES: [&str; 3] = ["$ref", "$dynamicRef", "$recursiveRef"];
const NAMES: [&str; 5] = ["$id", "id", "$anchor", "$dynamicAnchor", "$recursiveAnchor"];
/// Keywords that never look at the value.
const ANNOTATIONS: [&str; 16] = [
    "$id",
    "id",
    "$schema",
    "$anchor",
    "$dynamicAnchor",
    "$recursiveAnchor",
    "$defs",
    "definitions",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
];

struct Walk<'s> {
    /// The parts that a reference may name other than by a pointer: the root, and those with an id or an anchor.
    named: Vec<&'s Value>,
    /// Known counts, by the address of the part. `None` while a part is being counted.
    unseen: HashMap<usize, Option<usize>>,
}

/// Returns how many schemas may be applied between two looks at the value.
pub(super) fn check(schema: &Value) -> Result<usize, String> {
    let mut parts = Vec::new();
    collect(schema, &mut parts);
    let is_named = |part: &Map<String, Value>| NAMES.iter().any(|key| part.contains_key(*key));
    let named = parts.iter().filter(|(_, keywords)| is_named(keywords)).map(|(part, _)| *part);
    let named = std::iter::once(schema).chain(named).collect();
    let mut walk = Walk { named, unseen: HashMap::new() };
    let mut most = 0;
    for (_, keywords) in parts {
        most = most.max(walk.inside(keywords, 0)?);
    }
    if most > MAX_UNSEEN {
        return Err(format!(
            "at \"\": its parts refer to each other so that more than {MAX_UNSEEN} schemas apply to one value"
        ));
    }
    Ok(most)
}

/// Gathers all objects that may be schemas.
fn collect<'s>(schema: &'s Value, parts: &mut Vec<(&'s Value, &'s Map<String, Value>)>) {
    match schema {
        Value::Array(items) => items.iter().for_each(|item| collect(item, parts)),
        Value::Object(members) => {
            parts.push((schema, members));
            let members = members.iter().filter(|(keyword, _)| !DATA.contains(&keyword.as_str()));
            members.for_each(|(_, member)| collect(member, parts));
        }
        _ => {}
    }
}

impl<'s> Walk<'s> {
    /// Counts the schemas that are applied with `part` until one looks at the value.
    fn apply(&mut self, part: &'s Value, depth: usize) -> Result<usize, String> {
        let Value::Object(keywords) = part else { return Ok(1) };
        let inside = self.inside(keywords, depth)?;
        let looks = keywords.keys().any(|keyword| {
            let keyword = keyword.as_str();
            let known = [&APPLIES_ONE[..], &APPLIES_EACH, &REFERENCES, &ANNOTATIONS];
            !known.iter().any(|keywords| keywords.contains(&keyword))
        });
        Ok(if looks { 1 } else { inside.saturating_add(1) })
    }

    /// Counts the schemas that a part applies to its own value.
    fn inside(&mut self, part: &'s Map<String, Value>, depth: usize) -> Result<usize, String> {
        let address = std::ptr::from_ref(part).addr();
        match self.unseen.get(&address) {
            Some(Some(known)) => return Ok(*known),
            Some(None) => return Ok(0),
            None => {}
        }
        if depth == MAX_DEPTH {
            return Err(format!(
                "at \"\": more than {MAX_DEPTH} of its parts apply to the same value, one inside another"
            ));
        }
        self.unseen.insert(address, None);
        let mut count = 0_usize;
        for (keyword, argument) in part {
            let keyword = keyword.as_str();
            let added = match argument {
                Value::String(reference) if REFERENCES.contains(&keyword) => {
                    let mut most = 0;
                    for target in self.targets(reference) {
                        most = most.max(self.apply(target, depth + 1)?);
                    }
                    most
                }
                Value::Array(schemas) if APPLIES_EACH.contains(&keyword) => self.sum(schemas, depth)?,
                Value::Object(schemas) if ["dependentSchemas", "dependencies"].contains(&keyword) => {
                    self.sum(schemas.values(), depth)?
                }
                schema if APPLIES_ONE.contains(&keyword) => self.apply(schema, depth + 1)?,
                _ => 0,
            };
            count = count.saturating_add(added);
        }
        self.unseen.insert(address, Some(count));
        Ok(count)
    }

    fn sum(&mut self, schemas: impl IntoIterator<Item = &'s Value>, depth: usize) -> Result<usize, String> {
        let mut sum = 0_usize;
        for schema in schemas {
            sum = sum.saturating_add(self.apply(schema, depth + 1)?);
        }
        Ok(sum)
    }

    /// Returns the parts that a reference may mean. Relative names are not resolved: parts whose last segment is the same are candidates,
    /// and if there are none, all named parts are.
    fn targets(&self, reference: &str) -> Vec<&'s Value> {
        let (resource, fragment) = reference.split_once('#').unwrap_or((reference, ""));
        if fragment.starts_with('/') {
            let pointer = percent_decoded(fragment);
            return self.named.iter().filter_map(|resource| resource.pointer(&pointer)).collect();
        }
        let name = last_segment(if fragment.is_empty() { resource } else { fragment });
        let has_name = |part: &&'s Value| {
            let mut names = NAMES.iter().filter_map(|key| part.get(key)?.as_str());
            names.any(|known| last_segment(known) == name)
        };
        let found: Vec<&Value> = self.named.iter().copied().filter(has_name).collect();
        if found.is_empty() || name.is_empty() { self.named.clone() } else { found }
    }
}

fn last_segment(name: &str) -> &str {
    let name = name.trim_end_matches(['#', '/']);
    name.rsplit(['/', ':', '#']).next().unwrap_or(name)
}
