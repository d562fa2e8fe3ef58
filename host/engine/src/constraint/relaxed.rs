//! Relaxes a canonical schema for the compiler: keeps the part that a mask can follow, and records every
//! location where that is less than what the schema says.
//!
//! Invariant: every value that validates against the schema and is written within the bounds of the accepted
//! set validates against the result. Every value that validates against the result also validates against the
//! schema, except at the locations in `lost`.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use super::canonical::{children, target};
use super::schema_keywords::{Members, pointer};
use super::{multiples, one_of, schema_bounds};

/// Keywords that apply whole schemas. The compiler intersects them with the keywords before them, so they come
/// last: `additionalProperties` must not be read without the `patternProperties` that it belongs to.
const APPLICATORS: [&str; 6] = ["const", "enum", "allOf", "anyOf", "oneOf", "$ref"];

/// A float holds every whole number up to this one.
const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;
/// Past this number, whole numbers are not exact in the compiler, which computes in 64 bits.
const LARGEST_BOUND: f64 = 9e18;

/// Checks of parts of a document that can be made before the whole is compiled.
pub(super) struct CompilerSupport<'a> {
    /// Whether the compiler accepts the regular expression.
    pub pattern: &'a dyn Fn(&str) -> bool,
    /// Whether the compiler can distinguish the `patternProperties` of this object.
    pub names: &'a dyn Fn(&Members) -> bool,
}

/// The parts of a document that are relaxed after compiling failed.
#[derive(Debug, Clone, Default)]
pub(super) struct Relaxations {
    /// Locations of which only the type is kept.
    pub locations: HashSet<String>,
    /// Whether to drop the keywords next to a reference that leads back to itself.
    pub beside_cycles: bool,
}

/// A schema for the compiler.
pub(super) struct RelaxedSchema {
    pub schema: Value,
    /// Locations where the schema was relaxed, as pointers into the canonical document.
    pub lost: HashSet<String>,
    /// Whether strings may have `\u` escapes. They may not where an additional property has a schema of its
    /// own, because the compiler does not see that `"\u0061"` is the `a` that is described.
    pub unicode_escapes: bool,
    /// Whether rules may replace what the compiler cannot write.
    pub as_rules: bool,
}

pub(super) fn relaxed(
    document: &Value,
    relaxations: &Relaxations,
    abilities: &CompilerSupport<'_>,
) -> RelaxedSchema {
    let mut relaxer = Relaxer {
        document,
        relaxations,
        abilities,
        cycles: if relaxations.beside_cycles { cycles(document) } else { HashSet::new() },
        multiples_fit: multiples::fit(document),
        unicode_escapes: !describes_additional_names(document),
        lost: HashSet::new(),
    };
    let schema = relaxer.schema(document, "");
    RelaxedSchema { schema, lost: relaxer.lost, unicode_escapes: relaxer.unicode_escapes, as_rules: true }
}

/// Returns the references of a canonical document that lead back to themselves.
pub(super) fn cycles(document: &Value) -> HashSet<String> {
    let definitions = document.get("$defs").and_then(Value::as_object);
    let names = definitions.into_iter().flatten().map(|(name, _)| format!("#/$defs/{name}"));
    let all: Vec<String> = std::iter::once("#".to_string()).chain(names).collect();
    let leads_back = |reference: &&String| {
        let mut seen = HashSet::new();
        let mut queue = vec![(*reference).clone()];
        while let Some(next) = queue.pop() {
            let mut found = Vec::new();
            if let Some(schema) = document.pointer(target(&next)) {
                references_within(schema, &mut found);
            }
            for reference in found {
                if seen.insert(reference.clone()) {
                    queue.push(reference);
                }
            }
        }
        seen.contains(*reference)
    };
    all.iter().filter(leads_back).cloned().collect()
}

/// Collects the references of a schema, but not those of its definitions.
fn references_within(schema: &Value, found: &mut Vec<String>) {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        found.push(reference.to_string());
    }
    for (key, _, child) in children(schema, "") {
        if key != "$defs" {
            references_within(child, found);
        }
    }
}

fn describes_additional_names(schema: &Value) -> bool {
    let additional = schema
        .get("additionalProperties")
        .is_some_and(|additional| !says_nothing(additional) && additional != &Value::Bool(false));
    let describes = ["properties", "patternProperties", "required"]
        .iter()
        .filter_map(|key| schema.get(*key))
        .any(|said| {
            said.as_object().is_some_and(|m| !m.is_empty()) || said.as_array().is_some_and(|l| !l.is_empty())
        });
    additional && describes
        || children(schema, "").iter().any(|(_, _, child)| describes_additional_names(child))
}

fn says_nothing(schema: &Value) -> bool {
    schema == &Value::Bool(true) || schema.as_object().is_some_and(Map::is_empty)
}

struct Relaxer<'a> {
    document: &'a Value,
    relaxations: &'a Relaxations,
    abilities: &'a CompilerSupport<'a>,
    cycles: HashSet<String>,
    multiples_fit: bool,
    unicode_escapes: bool,
    lost: HashSet<String>,
}

impl Relaxer<'_> {
    fn schema(&mut self, schema: &Value, at: &str) -> Value {
        let Value::Object(members) = schema else { return schema.clone() };
        if self.relaxations.locations.contains(at) {
            self.lost.insert(at.to_string());
            return self.only_type(members, at);
        }
        let (mut plain, mut applied) = (Map::new(), Map::new());
        for (key, value) in members {
            let Some(value) = self.keyword(key, value, members, at) else { continue };
            let order = if APPLICATORS.contains(&key.as_str()) { &mut applied } else { &mut plain };
            order.insert(key.clone(), value);
        }
        self.settle_alternatives(&mut applied, at);
        self.break_cycles(&mut plain, &mut applied, at);
        bound_numbers(&mut plain);
        self.open_names(&mut plain);
        plain.extend(applied);
        Value::Object(plain)
    }

    fn only_type(&mut self, members: &Members, at: &str) -> Value {
        let mut kept = Map::new();
        if let Some(kind) = members.get("type") {
            kept.insert("type".to_string(), kind.clone());
        }
        bound_numbers(&mut kept);
        // The root's definitions stay for the schemas that refer to them.
        if let Some(definitions) = members.get("$defs") {
            kept.insert("$defs".to_string(), self.each_member(definitions, &pointer(at, "$defs")));
        }
        kept.into()
    }

    /// Returns the keyword's value for the compiler, or `None` if the keyword has to be dropped.
    fn keyword(&mut self, key: &str, value: &Value, members: &Members, at: &str) -> Option<Value> {
        let location = pointer(at, key);
        let is_array = value.is_array();
        let kept = match key {
            "$defs" | "properties" => Some(self.each_member(value, &location)),
            "patternProperties" if self.tells_names_apart(members) => {
                Some(self.each_member(value, &location))
            }
            "patternProperties" => None,
            // Without the patterns, it would forbid the properties that they describe.
            "additionalProperties"
                if members.contains_key("patternProperties") && !self.tells_names_apart(members) =>
            {
                None
            }
            "items" | "additionalProperties" => Some(self.schema(value, &location)),
            "prefixItems" | "allOf" | "anyOf" | "oneOf" if is_array => Some(self.each_item(value, &location)),
            "minItems" | "maxItems" | "minLength" | "maxLength" => within_count(value),
            "minProperties" | "maxProperties" if counts_properties(members) => within_count(value),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => exact_bound(key, value),
            "multipleOf" => self.multiples_fit.then(|| value.clone()),
            "pattern" => {
                let pattern = value.as_str().unwrap_or_default();
                let speakable = self.unicode_escapes || schema_bounds::spells_no_control(pattern);
                (speakable && (self.abilities.pattern)(pattern)).then(|| value.clone())
            }
            "const" | "enum" => (self.unicode_escapes || !has_control(value)).then(|| value.clone()),
            // The last one is for the rules of the document; the compiler does not see it.
            "type" | "required" | "format" | "$ref" | "x-key-order" => Some(value.clone()),
            _ if asserts_nothing(key, value, members) => return None,
            _ => None,
        };
        if kept.is_none() {
            self.lost.insert(at.to_string());
        }
        kept
    }

    fn each_member(&mut self, schemas: &Value, location: &str) -> Value {
        let schemas = schemas.as_object().into_iter().flatten();
        schemas.map(|(name, schema)| (name.clone(), self.schema(schema, &pointer(location, name)))).collect()
    }

    fn each_item(&mut self, schemas: &Value, location: &str) -> Value {
        let schemas = schemas.as_array().into_iter().flatten().enumerate();
        schemas.map(|(index, schema)| self.schema(schema, &format!("{location}/{index}"))).collect()
    }

    fn tells_names_apart(&self, members: &Members) -> bool {
        let patterns = members.get("patternProperties").and_then(Value::as_object);
        let speakable = |pattern: &String| {
            (self.unicode_escapes || schema_bounds::spells_no_control(pattern))
                && (self.abilities.pattern)(pattern)
        };
        patterns.is_none_or(|patterns| patterns.keys().all(speakable)) && (self.abilities.names)(members)
    }

    /// Replaces `oneOf` by `anyOf`, which is equivalent if its alternatives exclude each other and looser if
    /// they do not.
    fn settle_alternatives(&mut self, applied: &mut Members, at: &str) {
        let Some(alternatives) = applied.remove("oneOf") else { return };
        let said = self.document.pointer(at).and_then(|schema| schema.get("oneOf")?.as_array());
        if !said.is_some_and(|said| one_of::is_exclusive(said, self.document)) {
            self.lost.insert(at.to_string());
        }
        if !applied.contains_key("anyOf") {
            applied.insert("anyOf".to_string(), alternatives);
            return;
        }
        let both = json!({"anyOf": alternatives});
        match applied.get_mut("allOf") {
            Some(Value::Array(all)) => all.push(both),
            _ => _ = applied.insert("allOf".to_string(), json!([both])),
        }
    }

    /// Drops schemas that the compiler would have to intersect with one that it is still reading, which it
    /// cannot do.
    fn break_cycles(&mut self, plain: &mut Members, applied: &mut Members, at: &str) {
        let leads_back = |schema: &Value| {
            schema.get("$ref").and_then(Value::as_str).is_some_and(|to| self.cycles.contains(to))
        };
        let mut is_relaxed = false;
        if applied.get("$ref").and_then(Value::as_str).is_some_and(|to| self.cycles.contains(to)) {
            let beside = |key: &String| !matches!(key.as_str(), "$ref" | "$defs");
            is_relaxed = plain.keys().any(beside) || applied.keys().any(beside);
            plain.retain(|key, _| !beside(key));
            applied.retain(|key, _| !beside(key));
        } else if let Some(Value::Array(all)) = applied.get_mut("allOf") {
            let others = plain.keys().any(|key| key != "$defs") || all.len() > 1;
            if others && all.iter().any(leads_back) {
                all.retain(|schema| !leads_back(schema));
                is_relaxed = true;
                if all.is_empty() {
                    applied.remove("allOf");
                }
            }
        }
        if is_relaxed {
            self.lost.insert(at.to_string());
        }
    }

    /// Describes additional names by a pattern that matches every name. The compiler distinguishes a described
    /// name from an additional one only by its spelling, escapes included; a name that matches a pattern is
    /// compared by its meaning.
    fn open_names(&self, plain: &mut Members) {
        let describes = ["properties", "required"].iter().any(|key| plain.contains_key(*key));
        let is_open = plain.get("additionalProperties").is_none_or(says_nothing);
        let bounded = plain.contains_key("minProperties") || plain.contains_key("maxProperties");
        if !self.unicode_escapes
            || !describes
            || !is_open
            || bounded
            || plain.contains_key("patternProperties")
        {
            return;
        }
        let may_be_object = plain.get("type").is_none_or(|kind| {
            kind == "object" || kind.as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "object"))
        });
        if may_be_object {
            plain.insert("patternProperties".to_string(), json!({"": true}));
            plain.insert("additionalProperties".to_string(), json!(false));
        }
    }
}

/// Returns whether the keyword with this value asserts nothing.
fn asserts_nothing(keyword: &str, value: &Value, members: &Members) -> bool {
    match keyword {
        "uniqueItems" => {
            value == &Value::Bool(false)
                || members.get("maxItems").and_then(Value::as_u64).is_some_and(|most| most <= 1)
        }
        "unevaluatedItems" => says_nothing(value) || members.contains_key("items"),
        "unevaluatedProperties" => says_nothing(value) || members.contains_key("additionalProperties"),
        "not" => value == &Value::Bool(false),
        "if" => !members.contains_key("then") && !members.contains_key("else"),
        "then" | "else" => !members.contains_key("if") || says_nothing(value),
        "contains" => members.get("minContains") == Some(&json!(0)) && !members.contains_key("maxContains"),
        "minContains" | "maxContains" => !members.contains_key("contains"),
        "dependentRequired" => value
            .as_object()
            .is_some_and(|entries| entries.values().all(|names| names.as_array().is_some_and(Vec::is_empty))),
        "dependentSchemas" => value.as_object().is_some_and(|entries| entries.values().all(says_nothing)),
        // Names are always strings.
        "propertyNames" => {
            says_nothing(value)
                || value
                    .as_object()
                    .is_some_and(|names| names.iter().all(|(key, value)| key == "type" && value == "string"))
        }
        _ => false,
    }
}

fn within_count(value: &Value) -> Option<Value> {
    value.as_u64().is_some_and(|count| count <= schema_bounds::MAX_REPETITIONS).then(|| value.clone())
}

/// Returns whether the compiler can count the properties of this object. Names that the schema does not spell
/// out may be generated twice, so only the first of them is sure to count.
fn counts_properties(members: &Members) -> bool {
    let number = |key: &str| members.get(key).and_then(Value::as_u64);
    let required: HashSet<&str> = members
        .get("required")
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect();
    let described = members.get("properties").and_then(Value::as_object);
    let optional = described.is_some_and(|names| names.keys().any(|name| !required.contains(name.as_str())));
    let closed = members.get("additionalProperties") == Some(&Value::Bool(false))
        && !members.contains_key("patternProperties");
    let least = number("minProperties").unwrap_or(0).saturating_sub(required.len() as u64);
    let most = number("maxProperties").map(|most| most.saturating_sub(required.len() as u64));
    if optional {
        // The count must be at least one, at most one, or exactly one.
        return least == 0 && most.is_none() || closed && least <= 1 && most.unwrap_or(1) == 1;
    }
    closed || least <= 1
}

/// Adds bounds to numbers. An integer has 64 bits, and a multiple must remain one after it was read as a float.
/// Without a bound, a model may also write digits forever.
fn bound_numbers(members: &mut Members) {
    let says = |kind: &str| match members.get("type") {
        Some(Value::Array(kinds)) => kinds.iter().any(|said| said == kind),
        said => said.is_some_and(|said| said == kind),
    };
    let largest = match (says("number"), members.contains_key("multipleOf")) {
        (true, true) => LARGEST_EXACT,
        (false, _) if says("integer") => LARGEST_BOUND,
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

/// Returns a bound that the compiler, which reads 64-bit floats and computes in 64-bit integers, cannot round
/// outward; `None` if nothing that it can count is left within the bound.
fn exact_bound(key: &str, value: &Value) -> Option<Value> {
    let bound = value.as_f64()?;
    if bound.abs() < LARGEST_EXACT {
        return Some(value.clone());
    }
    let is_lower = key.ends_with("inimum");
    if (if is_lower { bound } else { -bound }) >= LARGEST_BOUND {
        return None;
    }
    // Past 2^53, one float inward may be several numbers inward: stricter than requested, never looser.
    let inward = if is_lower { bound.next_up() } else { bound.next_down() };
    Some(json!(inward.clamp(-LARGEST_BOUND, LARGEST_BOUND)))
}

/// Returns whether a text contains a control character that only a `\u` escape can represent.
fn has_control(value: &Value) -> bool {
    let is_control = |c: char| c.is_ascii_control() && !matches!(c, '\n' | '\r' | '\t' | '\u{8}' | '\u{c}');
    match value {
        Value::String(text) => text.contains(is_control),
        Value::Array(items) => items.iter().any(has_control),
        Value::Object(members) => {
            members.iter().any(|(name, value)| name.contains(is_control) || has_control(value))
        }
        _ => false,
    }
}
