//! Converts a schema of any draft into a schema of 2020-12 that means the same and contains only assertions.
//!
//! Invariant: a value validates against the result exactly if it validates against the schema. Every reference
//! in the result is `#` or `#/$defs/NAME`, and the root's `$defs` hold every schema that is referred to, so any
//! part of it can stand alone with its definitions ([`standing_alone`]).

use std::collections::{BTreeSet, HashMap};

use serde_json::{Map, Value, json};

use super::drafts::Draft;
use super::schema_keywords::{Checked, Members, count, pointer};

/// String formats that are enforced, as syntax only: 30 February is refused, 29 February is a date in every
/// year.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

const ROOT_REFERENCE: &str = "#";
const DEFINITIONS: &str = "#/$defs/";
/// The name of the root among the definitions of a part that refers to it.
const ROOT_NAME: &str = "root";

/// Returns the canonical form of the document that `checked` describes.
pub(super) fn canonical(root: &Value, checked: &Checked) -> Value {
    let mut writer = Writer { root, checked, names: HashMap::new(), queue: Vec::new() };
    let mut document = match writer.schema(root, "") {
        Value::Object(members) => members,
        Value::Bool(true) => Map::new(),
        _ => Map::from_iter([("not".to_string(), json!({}))]),
    };
    let mut definitions = Map::new();
    while let Some((target, name)) = writer.queue.pop() {
        let schema = root.pointer(&target).unwrap_or(&Value::Bool(true));
        definitions.insert(name, writer.schema(schema, &target));
    }
    if !definitions.is_empty() {
        document.insert("$defs".to_string(), definitions.into());
    }
    Value::Object(document)
}

/// Returns the name of the definition that a canonical reference leads to, or `None` for the root.
pub(super) fn definition_name(reference: &str) -> Option<&str> {
    reference.strip_prefix(DEFINITIONS)
}

/// Returns the pointer that a canonical reference leads to.
pub(super) fn target(reference: &str) -> &str {
    reference.strip_prefix(ROOT_REFERENCE).unwrap_or(reference)
}

/// Returns a part of a canonical document as a schema of its own, with the definitions that it needs.
pub(super) fn standing_alone(part: &Value, document: &Value) -> Value {
    let mut part = part.clone();
    let is_root = part.get("$defs").is_some();
    let mut needed = BTreeSet::new();
    let mut queue = Vec::new();
    if is_root && let Some(members) = part.as_object_mut() {
        members.remove("$defs");
    }
    collect_references(&part, &mut |reference| queue.push(reference.to_string()));
    let mut definitions = Map::new();
    while let Some(reference) = queue.pop() {
        if !needed.insert(reference.clone()) {
            continue;
        }
        let (name, mut definition) = match definition_name(&reference) {
            Some(name) => (name, document["$defs"][name].clone()),
            None => (ROOT_NAME, document.clone()),
        };
        if name == ROOT_NAME
            && let Some(members) = definition.as_object_mut()
        {
            members.remove("$defs");
        }
        collect_references(&definition, &mut |reference| queue.push(reference.to_string()));
        rename_root(&mut definition);
        definitions.insert(name.to_string(), definition);
    }
    rename_root(&mut part);
    let Value::Object(mut members) = part else { return part };
    members.insert("$schema".to_string(), json!("https://json-schema.org/draft/2020-12/schema"));
    if !definitions.is_empty() {
        members.insert("$defs".to_string(), definitions.into());
    }
    Value::Object(members)
}

/// Returns the schemas directly within a canonical schema, with their keywords and pointers.
pub(super) fn children<'a>(schema: &'a Value, at: &str) -> Vec<(&'a str, String, &'a Value)> {
    let mut found = Vec::new();
    for (key, value) in schema.as_object().into_iter().flatten() {
        let location = pointer(at, key);
        match (key.as_str(), value) {
            ("properties" | "patternProperties" | "$defs" | "dependentSchemas", Value::Object(schemas)) => {
                found.extend(schemas.iter().map(|(name, s)| (key.as_str(), pointer(&location, name), s)));
            }
            ("prefixItems" | "anyOf" | "oneOf" | "allOf", Value::Array(schemas)) => {
                found.extend(
                    schemas.iter().enumerate().map(|(n, s)| (key.as_str(), format!("{location}/{n}"), s)),
                );
            }
            (
                "items"
                | "additionalProperties"
                | "unevaluatedProperties"
                | "unevaluatedItems"
                | "contains"
                | "propertyNames"
                | "not"
                | "if"
                | "then"
                | "else",
                schema,
            ) => found.push((key.as_str(), location, schema)),
            _ => {}
        }
    }
    found
}

fn collect_references(schema: &Value, found: &mut dyn FnMut(&str)) {
    if let Some(reference) = schema.get("$ref").and_then(Value::as_str) {
        found(reference);
    }
    for (_, _, child) in children(schema, "") {
        collect_references(child, found);
    }
}

fn rename_root(schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    for (key, value) in members.iter_mut() {
        match (key.as_str(), value) {
            ("$ref", Value::String(reference)) if reference == ROOT_REFERENCE => {
                *reference = format!("{DEFINITIONS}{ROOT_NAME}");
            }
            ("const" | "enum", _) => {}
            ("properties" | "patternProperties" | "dependentSchemas", Value::Object(schemas)) => {
                schemas.values_mut().for_each(rename_root);
            }
            (_, Value::Array(schemas)) => schemas.iter_mut().for_each(rename_root),
            (_, schema) => rename_root(schema),
        }
    }
}

struct Writer<'a> {
    root: &'a Value,
    checked: &'a Checked,
    /// The names of definitions, by the pointers of their schemas.
    names: HashMap<String, String>,
    queue: Vec<(String, String)>,
}

impl Writer<'_> {
    fn schema(&mut self, schema: &Value, at: &str) -> Value {
        let Value::Object(members) = schema else { return schema.clone() };
        let mut written = Map::new();
        if let Some(target) = self.checked.targets.get(at) {
            let reference = self.reference(target);
            written.insert("$ref".to_string(), reference.into());
            if self.checked.draft.ignores_siblings_of_ref() && members.contains_key("$ref") {
                return Value::Object(written);
            }
        }
        for (key, value) in members {
            self.keyword(key, value, members, at, &mut written);
        }
        close_plainly(&mut written);
        Value::Object(written)
    }

    fn keyword(&mut self, key: &str, value: &Value, members: &Members, at: &str, written: &mut Members) {
        let location = pointer(at, key);
        let draft = self.checked.draft;
        let mut put = |key: &str, value: Value| _ = written.insert(key.to_string(), value);
        match key {
            "properties" | "patternProperties" | "dependentSchemas" => {
                put(key, self.each_member(value, &location))
            }
            "dependencies" => {
                let entries = value.as_object().into_iter().flatten();
                let (names, schemas): (Vec<_>, Vec<_>) = entries.partition(|(_, entry)| entry.is_array());
                if !names.is_empty() {
                    put(
                        "dependentRequired",
                        names.into_iter().map(|(k, v)| (k.clone(), v.clone())).collect(),
                    );
                }
                if !schemas.is_empty() {
                    let schemas = schemas.into_iter();
                    put(
                        "dependentSchemas",
                        schemas.map(|(k, v)| (k.clone(), self.schema(v, &pointer(&location, k)))).collect(),
                    );
                }
            }
            "items" => match value {
                Value::Array(list) if !list.is_empty() => put("prefixItems", self.each_item(list, &location)),
                Value::Array(_) => {}
                schema => put("items", self.schema(schema, &location)),
            },
            "additionalItems" if members.get("items").is_some_and(Value::is_array) => {
                put("items", self.schema(value, &location));
            }
            "prefixItems" if !draft.has_prefix_items() => {}
            "prefixItems" | "anyOf" | "oneOf" | "allOf" => {
                put(key, self.each_item(value.as_array().map_or(&[], Vec::as_slice), &location));
            }
            "if" | "then" | "else" if draft < Draft::Draft7 => {}
            "additionalProperties"
            | "unevaluatedProperties"
            | "unevaluatedItems"
            | "propertyNames"
            | "contains"
            | "not"
            | "if"
            | "then"
            | "else" => put(key, self.schema(value, &location)),
            "exclusiveMinimum" | "exclusiveMaximum" if value.is_boolean() => {
                let bound = if key == "exclusiveMinimum" { "minimum" } else { "maximum" };
                if let Some(limit) = members.get(bound).filter(|_| value == &Value::Bool(true)) {
                    put(key, limit.clone());
                }
            }
            "minimum" if members.get("exclusiveMinimum") == Some(&Value::Bool(true)) => {}
            "maximum" if members.get("exclusiveMaximum") == Some(&Value::Bool(true)) => {}
            "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties" | "maxProperties"
            | "minContains" | "maxContains" => put(key, count(value).map_or(value.clone(), Value::from)),
            "format" => {
                let is_enforced = value.as_str().is_some_and(|format| FORMATS.contains(&format));
                if is_enforced && may_be_string(members) {
                    put(key, value.clone());
                }
            }
            "type" | "enum" | "const" | "required" | "dependentRequired" | "uniqueItems" | "pattern"
            | "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf"
            | "x-key-order" => put(key, value.clone()),
            _ => {}
        }
    }

    fn each_member(&mut self, schemas: &Value, location: &str) -> Value {
        let schemas = schemas.as_object().into_iter().flatten();
        schemas.map(|(name, schema)| (name.clone(), self.schema(schema, &pointer(location, name)))).collect()
    }

    fn each_item(&mut self, schemas: &[Value], location: &str) -> Value {
        let numbered = schemas.iter().enumerate();
        numbered.map(|(index, schema)| self.schema(schema, &format!("{location}/{index}"))).collect()
    }

    /// Returns the canonical reference to the schema at `target`, which becomes a definition.
    fn reference(&mut self, target: &str) -> String {
        if target.is_empty() {
            return ROOT_REFERENCE.to_string();
        }
        if let Some(name) = self.names.get(target) {
            return format!("{DEFINITIONS}{name}");
        }
        debug_assert!(self.root.pointer(target).is_some());
        let last = target.rsplit('/').next().unwrap_or_default();
        let plain: String =
            last.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '_').take(40).collect();
        let is_free =
            |name: &str| name != ROOT_NAME && !name.is_empty() && !self.names.values().any(|n| n == name);
        let name = match is_free(&plain) {
            true => plain,
            false => format!("{plain}-{}", self.names.len()),
        };
        self.names.insert(target.to_string(), name.clone());
        self.queue.push((target.to_string(), name.clone()));
        format!("{DEFINITIONS}{name}")
    }
}

/// Turns unevaluated members into additional ones, which they are if no other schema describes the same value.
fn close_plainly(members: &mut Members) {
    let applicators = ["$ref", "allOf", "anyOf", "oneOf", "if", "dependentSchemas", "contains"];
    if applicators.iter().any(|key| members.contains_key(*key)) {
        return;
    }
    for (rest, additional) in
        [("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")]
    {
        if let Some(schema) = members.remove(rest) {
            members.entry(additional).or_insert(schema);
        }
    }
}

fn may_be_string(members: &Members) -> bool {
    match members.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => true,
    }
}
