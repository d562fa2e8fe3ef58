//! Which JSON Schema keywords are enforced while decoding, and that a schema holds no other.
//!
//! Invariant: a keyword that passes is enforced in full by the compiler, or asserts nothing. One that cannot be
//! enforced, an unknown one (a misspelt `maxLenght`) and a value of the wrong kind are refused with the keyword and
//! its JSON pointer. Only places where a schema stands are read: the members of `properties` are names, and what is
//! in `const`, `enum`, `default` or `examples` is data.

use std::collections::HashSet;

use serde_json::{Map, Value};

use super::schema_bounds;

type Members = Map<String, Value>;

/// Keywords that say nothing about what validates. `format` of a number is one too: `int32`, `double`.
const ANNOTATIONS: [&str; 23] = [
    "$schema",
    "$id",
    "id",
    "$anchor",
    "$comment",
    "title",
    "description",
    "default",
    "examples",
    "example",
    "deprecated",
    "readOnly",
    "writeOnly",
    "contentMediaType",
    "contentEncoding",
    "contentSchema",
    "discriminator",
    "externalDocs",
    "xml",
    "enumNames",
    "enumDescriptions",
    "markdownDescription",
    "$vocabulary",
];

/// String formats that are enforced, as syntax: 30 February is refused, 29 February is a date in every year.
const FORMATS: [&str; 10] =
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"];

/// Keywords of JSON Schema and OpenAPI that no grammar can follow here, and what to write instead.
const IMPOSSIBLE: [(&str, &str); 18] = [
    ("not", "say what is allowed instead, with `enum`, `type` or `pattern`"),
    ("if", "write the cases as `anyOf`"),
    ("then", "write the cases as `anyOf`"),
    ("else", "write the cases as `anyOf`"),
    ("contains", "use `prefixItems` for places that are known"),
    ("minContains", "use `prefixItems` for places that are known"),
    ("maxContains", "use `prefixItems` for places that are known"),
    ("uniqueItems", "remove it, and check the values afterwards"),
    ("propertyNames", "use `patternProperties` with `additionalProperties: false`"),
    ("dependencies", "write the cases as `anyOf`"),
    ("dependentRequired", "write the cases as `anyOf`"),
    ("dependentSchemas", "write the cases as `anyOf`"),
    ("unevaluatedItems", "use `items: false`"),
    ("unevaluatedProperties", "use `additionalProperties: false`"),
    ("$dynamicRef", "use `$ref`"),
    ("$dynamicAnchor", "use `$defs`"),
    ("$recursiveRef", "use `$ref`"),
    ("nullable", "use `\"type\": [\"…\", \"null\"]`"),
];

const TYPES: [&str; 7] = ["null", "boolean", "integer", "number", "string", "array", "object"];

/// Past this, whole numbers are not exact in the compiler, which computes in 64 bits.
pub(super) const LARGEST_BOUND: f64 = 9e18;

/// Refuses what would not be enforced.
pub(super) fn check(schema: &Value) -> Result<(), String> {
    let mut walk = Walk { schemas: HashSet::new(), references: Vec::new() };
    walk.schema(schema, "")?;
    for (at, reference) in &walk.references {
        let place = reference.strip_prefix('#').filter(|place| walk.schemas.contains(*place));
        if place.is_none() || reference.contains(['~', '%']) {
            return Err(format!(
                "`$ref` at `{at}` is {reference:?}, which is no schema of this document; \
                 refer to one by its pointer, as `#/$defs/NAME`"
            ));
        }
    }
    check_multiples(schema)
}

/// Whether the keyword with this value asserts nothing, so that it can be left out.
pub(super) fn asserts_nothing(keyword: &str, value: &Value, members: &Members) -> bool {
    let is_true = value == &Value::Bool(true);
    match keyword {
        "uniqueItems" | "nullable" => value == &Value::Bool(false),
        "unevaluatedItems" | "unevaluatedProperties" => is_true,
        // Names are strings anyway.
        "propertyNames" => {
            is_true
                || value.as_object().is_some_and(|names| {
                    names.iter().all(|(key, value)| key == "type" && value == "string" || is_annotation(key))
                })
        }
        "additionalItems" => !members.get("items").is_some_and(Value::is_array),
        "format" => !may_be_string(members),
        keyword => is_annotation(keyword),
    }
}

pub(super) fn pointer(at: &str, key: &str) -> String {
    format!("{at}/{}", key.replace('~', "~0").replace('/', "~1"))
}

fn is_annotation(keyword: &str) -> bool {
    ANNOTATIONS.contains(&keyword) || keyword.starts_with("x-")
}

fn may_be_string(members: &Members) -> bool {
    match members.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => true,
    }
}

struct Walk {
    /// Pointers of the places where schemas stand.
    schemas: HashSet<String>,
    /// Pointer and value of each `$ref`.
    references: Vec<(String, String)>,
}

impl Walk {
    fn schema(&mut self, schema: &Value, at: &str) -> Result<(), String> {
        self.schemas.insert(at.to_string());
        match schema {
            Value::Bool(_) => Ok(()),
            Value::Object(members) => {
                members.iter().try_for_each(|(key, value)| self.keyword(key, value, members, at))
            }
            other => {
                Err(format!("a schema is an object or a boolean, but at `{at}` stands {}", brief(other)))
            }
        }
    }

    fn keyword(&mut self, key: &str, value: &Value, members: &Members, at: &str) -> Result<(), String> {
        let place = pointer(at, key);
        let wrong =
            |wanted: &str| Err(format!("`{key}` at `{place}` must be {wanted}, but is {}", brief(value)));
        match key {
            "properties" | "patternProperties" | "$defs" | "definitions" => {
                let Value::Object(schemas) = value else { return wrong("an object of schemas") };
                for (name, schema) in schemas {
                    if key == "patternProperties" {
                        schema_bounds::check_string_pattern(name)
                            .map_err(|message| format!("`{key}` at `{place}`: {message}"))?;
                    }
                    self.schema(schema, &pointer(&place, name))?;
                }
                Ok(())
            }
            "items" if !value.is_array() => self.schema(value, &place),
            "items" | "prefixItems" | "anyOf" | "oneOf" | "allOf" => self.list(key, value, members, &place),
            "additionalProperties" | "additionalItems" => self.schema(value, &place),
            "$ref" => {
                let Value::String(reference) = value else { return wrong("a string") };
                self.references.push((place, reference.clone()));
                Ok(())
            }
            "$id" if !at.is_empty() => {
                Err(format!("`$id` at `{place}` would move what references mean; only the root may have one"))
            }
            "type" => {
                let kinds = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                let known = kinds.iter().all(|kind| kind.as_str().is_some_and(|kind| TYPES.contains(&kind)));
                if known && !kinds.is_empty() {
                    Ok(())
                } else {
                    wrong(&format!("one of {}", TYPES.join(", ")))
                }
            }
            "enum" if value.as_array().is_none_or(Vec::is_empty) => wrong("a list that is not empty"),
            "enum" | "const" => match unspeakable(value) {
                Some(c) => wrong(&format!("without U+{:04X}, which is never generated", u32::from(c))),
                None => Ok(()),
            },
            "required" => match value.as_array() {
                Some(names) if names.iter().all(Value::is_string) => Ok(()),
                _ => wrong("a list of strings"),
            },
            "minItems" | "maxItems" | "minLength" | "maxLength" | "maxProperties" => {
                count(value, key, &place)
            }
            "minProperties" => count(value, key, &place).and_then(|()| names_differ(value, members, &place)),
            "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" => bound(value, key, &place),
            "multipleOf" => match value.as_f64() {
                Some(number) if number > 0.0 => Ok(()),
                _ => wrong("a number greater than 0"),
            },
            "pattern" => {
                let Value::String(pattern) = value else { return wrong("a string") };
                schema_bounds::check_string_pattern(pattern)
                    .map_err(|message| format!("`{key}` at `{place}`: {message}"))
            }
            "format" if may_be_string(members) => match value.as_str() {
                Some(format) if FORMATS.contains(&format) => Ok(()),
                Some(_) => wrong(&format!("one of the formats that are enforced ({})", FORMATS.join(", "))),
                None => wrong("a string"),
            },
            _ if asserts_nothing(key, value, members) => Ok(()),
            _ => Err(match IMPOSSIBLE.iter().find(|(known, _)| *known == key) {
                Some((_, instead)) => {
                    format!("`{key}` at `{place}` cannot be enforced while decoding; {instead}")
                }
                None => format!(
                    "`{key}` at `{place}` is no keyword that is known here; \
                     if it is a note, begin its name with `x-`"
                ),
            }),
        }
    }

    fn list(&mut self, key: &str, value: &Value, members: &Members, place: &str) -> Result<(), String> {
        let Some(schemas) = value.as_array().filter(|list| !list.is_empty()) else {
            return Err(format!("`{key}` at `{place}` must be a list of schemas, but is {}", brief(value)));
        };
        let has_old_tuple = members.get("items").is_some_and(Value::is_array);
        if key == "prefixItems" && (has_old_tuple || old_draft(members)) {
            return Err(format!(
                "`{key}` at `{place}` is of draft 2020-12, and the schema is of an older one"
            ));
        }
        schemas
            .iter()
            .enumerate()
            .try_for_each(|(index, schema)| self.schema(schema, &format!("{place}/{index}")))
    }
}

/// Drafts in which the list of `items` is what `prefixItems` is now.
fn old_draft(members: &Members) -> bool {
    let draft = members.get("$schema").and_then(Value::as_str).unwrap_or_default();
    ["draft-04", "draft-06", "draft-07", "2019-09"].iter().any(|old| draft.contains(old))
}

fn count(value: &Value, key: &str, place: &str) -> Result<(), String> {
    match value.as_u64() {
        Some(count) if count <= schema_bounds::MAX_REPETITIONS => Ok(()),
        Some(count) => Err(format!(
            "`{key}` at `{place}` is {count}; at most {} is allowed",
            schema_bounds::MAX_REPETITIONS
        )),
        None => {
            Err(format!("`{key}` at `{place}` must be a whole number from 0 on, but is {}", brief(value)))
        }
    }
}

/// A control character in a text that has no escape of its own in JSON. The compiler, told to generate no `\u…`,
/// would leave it out.
fn unspeakable(value: &Value) -> Option<char> {
    match value {
        Value::String(text) => text
            .chars()
            .find(|c| c.is_ascii_control() && !matches!(c, '\n' | '\r' | '\t' | '\u{8}' | '\u{c}')),
        Value::Array(items) => items.iter().find_map(unspeakable),
        Value::Object(members) => members.values().find_map(unspeakable),
        _ => None,
    }
}

/// Names that the schema does not spell out may be generated twice, so only the first of them is sure to count.
fn names_differ(value: &Value, members: &Members, place: &str) -> Result<(), String> {
    let required = members.get("required").and_then(Value::as_array).map_or(0, Vec::len) as u64;
    let closed = members.get("additionalProperties") == Some(&Value::Bool(false))
        && !members.contains_key("patternProperties");
    if closed || value.as_u64().is_some_and(|count| count <= required + 1) {
        return Ok(());
    }
    Err(format!(
        "`minProperties` at `{place}` can be enforced up to one more than there are `required` properties, \
         or with `additionalProperties: false`"
    ))
}

fn bound(value: &Value, key: &str, place: &str) -> Result<(), String> {
    let Some(bound) = value.as_f64() else {
        return Err(format!("`{key}` at `{place}` must be a number, but is {}", brief(value)));
    };
    let inward = if key.ends_with("inimum") { bound } else { -bound };
    if inward >= LARGEST_BOUND {
        return Err(format!(
            "`{key}` at `{place}` is {value}, which leaves only numbers past ±{LARGEST_BOUND:e}"
        ));
    }
    Ok(())
}

/// The compiler multiplies in 32 bits where several `multipleOf` meet.
fn check_multiples(schema: &Value) -> Result<(), String> {
    let mut found = Vec::new();
    collect_multiples(schema, &mut found);
    found.sort_by(f64::total_cmp);
    found.dedup();
    let too_many_digits = |number: f64| {
        format!("`multipleOf` is {number}; it may have 6 digits after the point and be {} at most", u32::MAX)
    };
    let mut whole = Vec::new();
    for number in found {
        let micros = (number * 1e6).round();
        if micros < 1.0 || (micros / 1e6 - number).abs() > number * 1e-12 || number > f64::from(u32::MAX) {
            return Err(too_many_digits(number));
        }
        whole.push((number, micros as u128));
    }
    if let [_, _, ..] = whole.as_slice() {
        let scale = whole.iter().fold(1_000_000_u128, |scale, (_, micros)| gcd(scale, *micros));
        let (mut least, mut largest) = (1_u128, 1);
        for (number, micros) in &whole {
            let step = micros / scale;
            largest = step.max(largest);
            least = least / gcd(least, step) * step;
            if least * largest > u128::from(u32::MAX) {
                return Err(format!(
                    "`multipleOf` {number} and the others in the schema have too large a common multiple"
                ));
            }
        }
    }
    Ok(())
}

/// Also finds numbers that are data, which only makes the check stricter.
fn collect_multiples(value: &Value, found: &mut Vec<f64>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| collect_multiples(item, found)),
        Value::Object(members) => {
            found.extend(members.get("multipleOf").and_then(Value::as_f64));
            members.values().for_each(|member| collect_multiples(member, found));
        }
        _ => {}
    }
}

fn gcd(a: u128, b: u128) -> u128 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// A value in an error: schemas can be large.
fn brief(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}
