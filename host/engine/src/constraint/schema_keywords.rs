//! Validation of a JSON Schema: whether it is well formed, where its references lead, and what in it looks like
//! a mistake.
//!
//! Invariant: a known keyword has a value of the right kind, and every reference leads to a location in the
//! document; anything else is refused with the keyword and its JSON pointer. Unknown keywords are annotations;
//! one that is a letter away from a known keyword gets a warning. Only positions that hold a schema are read:
//! the members of `properties` are names, and the contents of `const`, `enum`, `default` and `examples` are
//! data.

use std::collections::HashMap;

use serde_json::{Map, Value};

use super::drafts::Draft;
use super::references::Anchors;
use super::schema_bounds;
use crate::json_pointer;

pub(super) type Members = Map<String, Value>;

/// Keywords that assert something or hold schemas.
const KNOWN: [&str; 52] = [
    "$ref",
    "$dynamicRef",
    "$recursiveRef",
    "$defs",
    "definitions",
    "$schema",
    "$anchor",
    "$dynamicAnchor",
    "type",
    "enum",
    "const",
    "properties",
    "patternProperties",
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "required",
    "minProperties",
    "maxProperties",
    "dependencies",
    "dependentRequired",
    "dependentSchemas",
    "items",
    "prefixItems",
    "additionalItems",
    "unevaluatedItems",
    "contains",
    "minContains",
    "maxContains",
    "minItems",
    "maxItems",
    "uniqueItems",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "then",
    "else",
    "title",
    "description",
    "default",
    "examples",
];

/// Annotations that are a letter away from a known keyword but are intended.
const MEANT: [&str; 3] = ["example", "definition", "itemsType"];

pub(super) const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// The result of a walk over a document.
pub(super) struct Checked {
    pub draft: Draft,
    /// The pointer that each reference leads to, by the pointer of the schema that contains it.
    pub targets: HashMap<String, String>,
    pub warnings: Vec<String>,
}

/// Reads the whole document once.
pub(super) fn check(root: &Value, takes_pattern: &dyn Fn(&str) -> bool) -> Result<Checked, String> {
    let mut walk = Walk {
        root,
        draft: Draft::of(root),
        anchors: Anchors::new(),
        seen: Default::default(),
        references: Vec::new(),
        warnings: Vec::new(),
        takes_pattern,
    };
    walk.schema(root, "")?;
    let mut targets = HashMap::new();
    // The target of a reference is a schema, wherever in the document it stands, and may contain references
    // too.
    while let Some(reference) = walk.references.pop() {
        let Reference { keyword, at, to } = &reference;
        let location = pointer(at, keyword);
        let found = match *keyword {
            "$dynamicRef" => walk.anchors.resolve_dynamic(at, to),
            _ => walk.anchors.resolve(at, to),
        };
        let target = found.and_then(|target| Some((root.pointer(&target)?, target)));
        let Some((schema, target)) = target else {
            return Err(format!(
                "`{keyword}` at `{location}` is {to:?}, which is not a schema in this document, and no other document \
                 is fetched; put it into `$defs` and refer to it as `#/$defs/NAME`"
            ));
        };
        if !walk.seen.contains(&target) {
            walk.schema(schema, &target)?;
        }
        targets.insert(at.clone(), target);
    }
    walk.warnings.sort();
    walk.warnings.dedup();
    Ok(Checked { draft: walk.draft, targets, warnings: walk.warnings })
}

pub(super) fn pointer(at: &str, key: &str) -> String {
    format!("{at}/{}", json_pointer::escape(key))
}

/// Returns a keyword's value as a whole number from 0 on. `2.0` counts as one.
pub(super) fn count(value: &Value) -> Option<u64> {
    value.as_u64().or_else(|| {
        let number = value.as_f64()?;
        (number >= 0.0 && number.fract() == 0.0 && number <= u64::MAX as f64).then_some(number as u64)
    })
}

struct Reference {
    keyword: &'static str,
    at: String,
    to: String,
}

struct Walk<'a> {
    root: &'a Value,
    draft: Draft,
    anchors: Anchors,
    seen: std::collections::HashSet<String>,
    references: Vec<Reference>,
    warnings: Vec<String>,
    takes_pattern: &'a dyn Fn(&str) -> bool,
}

impl Walk<'_> {
    fn schema(&mut self, schema: &Value, at: &str) -> Result<(), String> {
        self.seen.insert(at.to_string());
        match schema {
            Value::Bool(_) => Ok(()),
            Value::Object(members) => {
                self.anchors.record(schema, at, self.draft);
                let alone = self.draft.ignores_siblings_of_ref() && members.contains_key("$ref");
                for (key, value) in members {
                    let is_read = !alone || matches!(key.as_str(), "$ref" | "$defs" | "definitions");
                    if is_read {
                        self.keyword(key, value, at)?;
                    }
                }
                Ok(())
            }
            other => Err(format!(
                "a schema must be an object or a boolean, but at `{at}` there is {}",
                brief(other)
            )),
        }
    }

    fn keyword(&mut self, key: &str, value: &Value, at: &str) -> Result<(), String> {
        let location = pointer(at, key);
        let wrong =
            |wanted: &str| Err(format!("`{key}` at `{location}` must be {wanted}, but is {}", brief(value)));
        match key {
            "properties" | "patternProperties" | "$defs" | "definitions" | "dependentSchemas" => {
                let Value::Object(schemas) = value else {
                    return wrong("an object whose values are schemas");
                };
                for (name, schema) in schemas {
                    if key == "patternProperties" {
                        self.pattern(key, name, &location)?;
                    }
                    self.schema(schema, &pointer(&location, name))?;
                }
                Ok(())
            }
            "dependencies" | "dependentRequired" => {
                let Value::Object(entries) = value else { return wrong("an object") };
                for (name, entry) in entries {
                    match entry {
                        Value::Array(names) if names.iter().all(Value::is_string) => {}
                        entry if key == "dependencies" => self.schema(entry, &pointer(&location, name))?,
                        _ => return wrong("an object whose values are lists of names"),
                    }
                }
                Ok(())
            }
            "prefixItems" if !self.draft.has_prefix_items() => {
                self.warnings.push(format!(
                    "`prefixItems` at `{location}` belongs to draft 2020-12, but the schema names an older one, \
                     in which it has no effect; use a list of `items`"
                ));
                self.list(key, value, &location)
            }
            "items" if !value.is_array() => self.schema(value, &location),
            // An empty list of `items` asserts nothing.
            "items" if value.as_array().is_some_and(Vec::is_empty) => Ok(()),
            "items" | "prefixItems" | "anyOf" | "oneOf" | "allOf" => self.list(key, value, &location),
            "additionalProperties"
            | "additionalItems"
            | "unevaluatedProperties"
            | "unevaluatedItems"
            | "propertyNames"
            | "contains"
            | "not"
            | "if"
            | "then"
            | "else" => self.schema(value, &location),
            "$ref" => self.reference("$ref", value, at, wrong),
            "$dynamicRef" => self.reference("$dynamicRef", value, at, wrong),
            "$recursiveRef" => self.reference("$recursiveRef", value, at, wrong),
            "type" => {
                let kinds = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                let known = kinds.iter().all(|kind| kind.as_str().is_some_and(|kind| TYPES.contains(&kind)));
                if known && !kinds.is_empty() {
                    Ok(())
                } else {
                    wrong(&format!("one of {}", TYPES.join(", ")))
                }
            }
            "enum" if value.as_array().is_none_or(Vec::is_empty) => wrong("a non-empty list"),
            "required" => match value.as_array() {
                Some(names) if names.iter().all(Value::is_string) => Ok(()),
                _ => wrong("a list of strings"),
            },
            "minItems" | "maxItems" | "minLength" | "maxLength" | "minProperties" | "maxProperties"
            | "minContains" | "maxContains"
                if count(value).is_none() =>
            {
                wrong("a whole number of at least 0")
            }
            "minimum" | "maximum" if value.as_f64().is_none() => wrong("a number"),
            // Draft 4 uses a boolean here.
            "exclusiveMinimum" | "exclusiveMaximum" if value.is_boolean() => {
                let newer = self.root.get("$schema").is_some() && self.draft > Draft::Draft4;
                if newer { wrong("a number") } else { Ok(()) }
            }
            "exclusiveMinimum" | "exclusiveMaximum" if value.as_f64().is_none() => wrong("a number"),
            "uniqueItems" if !value.is_boolean() => wrong("true or false"),
            "multipleOf" => match value.as_f64() {
                Some(number) if number > 0.0 => Ok(()),
                _ => wrong("a number greater than 0"),
            },
            "pattern" => match value {
                Value::String(pattern) => self.pattern(key, pattern, &location),
                _ => wrong("a string"),
            },
            "format" if !value.is_string() => wrong("a string"),
            "nullable" if value == &Value::Bool(true) => {
                self.warnings.push(format!(
                    "`nullable` at `{location}` is an OpenAPI keyword and has no effect in JSON Schema; \
                     to allow null, write `\"type\": [\"…\", \"null\"]`"
                ));
                Ok(())
            }
            "x-key-order" if value != "any" => wrong("\"any\""),
            _ => {
                self.warn_of_misspelling(key, &location);
                Ok(())
            }
        }
    }

    fn reference(
        &mut self,
        keyword: &'static str,
        value: &Value,
        at: &str,
        wrong: impl Fn(&str) -> Result<(), String>,
    ) -> Result<(), String> {
        let Value::String(to) = value else { return wrong("a string") };
        self.references.push(Reference { keyword, at: at.to_string(), to: to.clone() });
        Ok(())
    }

    fn list(&mut self, key: &str, value: &Value, location: &str) -> Result<(), String> {
        let Some(schemas) = value.as_array().filter(|list| !list.is_empty()) else {
            return Err(format!(
                "`{key}` at `{location}` must be a non-empty list of schemas, but is {}",
                brief(value)
            ));
        };
        schemas
            .iter()
            .enumerate()
            .try_for_each(|(index, schema)| self.schema(schema, &format!("{location}/{index}")))
    }

    /// Refuses a pattern that neither a mask nor a check could follow.
    fn pattern(&self, key: &str, pattern: &str, location: &str) -> Result<(), String> {
        if (self.takes_pattern)(pattern) {
            return Ok(());
        }
        let fault = schema_bounds::check_pattern(pattern).err().unwrap_or_default();
        Err(format!(
            "`{key}` at `{location}`: {:?} is not a regular expression that can be enforced or checked{}{fault}",
            brief(&Value::from(pattern)),
            if fault.is_empty() { "" } else { ": " },
        ))
    }

    fn warn_of_misspelling(&mut self, key: &str, location: &str) {
        let is_vendors = key.starts_with("x-") || key.starts_with(|c: char| !c.is_alphabetic() && c != '$');
        if KNOWN.contains(&key) || MEANT.contains(&key) || key.len() < 4 || is_vendors {
            return;
        }
        let is_near =
            |known: &&&str| strsim::osa_distance(key, known) == 1 || key.eq_ignore_ascii_case(known);
        if let Some(known) = KNOWN.iter().find(is_near) {
            self.warnings.push(format!(
                "`{key}` at `{location}` is not a keyword and has no effect; did you mean `{known}`?"
            ));
        }
    }
}

/// Returns a value for an error message, shortened because schemas can be large.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
