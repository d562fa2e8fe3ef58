//! The way in which the value of an argument is written that stands between tags: a string as it is, anything else as
//! JSON.

use serde_json::{Map, Value, json};

use super::canonical::target;

/// Maximum number of references that lead from one to the next, and of alternatives within each other.
const MAX_REFERENCES: usize = 16;
/// Maximum length of a string that is enforced while it is written as it is.
pub(super) const MAX_COUNTED: u64 = 2000;
/// Maximum number of alternatives that are written one by one.
const MAX_ALTERNATIVES: usize = 32;
/// The keywords that allow no less than the schema beside them.
const ANNOTATIONS: [&str; 8] =
    ["title", "description", "default", "examples", "deprecated", "$comment", "$defs", "x-key-order"];
const ANYTHING: &str = "(\\n|.)*";

/// The alternatives of a value.
#[derive(Debug, PartialEq)]
pub(super) struct WrittenValue {
    /// Schemas of strings.
    pub texts: Vec<Value>,
    /// The schema of everything else, if anything else is allowed.
    pub json: Option<Value>,
}

impl WrittenValue {
    pub(super) fn of(schema: &Value, document: &Value) -> Self {
        let branches = alternatives(schema, document);
        let (mut texts, mut others) = (Vec::new(), Vec::new());
        for branch in &branches {
            let (text, other) = split(branch);
            texts.extend(text);
            others.extend(other);
        }
        // A text without bounds includes all others.
        if let Some(free) = texts.iter().position(|text| !bounds_text(text)) {
            texts = vec![texts.swap_remove(free)];
        }
        let json = match others.len() {
            0 => None,
            // Everything is JSON, so the schema says all of it.
            _ if texts.is_empty() => Some(schema.clone()),
            1 => others.pop(),
            _ => Some(json!({ "anyOf": others })),
        };
        WrittenValue { texts, json }
    }
}

/// Returns whether a schema of a string allows less than any string, as far as a mask can tell.
pub(super) fn bounds_text(schema: &Value) -> bool {
    let members = schema.as_object();
    let has = |key: &str| members.is_some_and(|members| members.contains_key(key));
    ["const", "enum", "pattern", "minLength", "maxLength"].into_iter().any(has)
        || text_format(schema).is_some()
}

/// Returns the only texts that the schema allows, if it lists them.
pub(super) fn listed_texts(schema: &Value) -> Option<Vec<&str>> {
    if let Some(value) = schema.get("const") {
        return value.as_str().map(|text| vec![text]);
    }
    schema.get("enum")?.as_array()?.iter().map(Value::as_str).collect()
}

/// Returns the schema that a schema with nothing but a reference refers to.
pub(super) fn followed<'a>(schema: &'a Value, document: &'a Value) -> &'a Value {
    let mut schema = schema;
    for _ in 0..MAX_REFERENCES {
        let reference = schema.get("$ref").and_then(Value::as_str);
        let Some(next) = reference.and_then(|reference| document.pointer(target(reference))) else { break };
        schema = next;
    }
    schema
}

/// Returns the schemas of which a value has to match one. A value that has to match only one of them is checked when it
/// is complete.
fn alternatives<'a>(schema: &'a Value, document: &'a Value) -> Vec<&'a Value> {
    let mut found = Vec::new();
    match collect(schema, document, 0, &mut found) {
        Some(()) if !found.is_empty() => found,
        _ => vec![schema],
    }
}

fn collect<'a>(
    schema: &'a Value,
    document: &'a Value,
    depth: usize,
    found: &mut Vec<&'a Value>,
) -> Option<()> {
    if depth > MAX_REFERENCES || found.len() >= MAX_ALTERNATIVES {
        return None;
    }
    let schema = followed(schema, document);
    let choices = schema.as_object().and_then(|members| {
        let mut saying = members.iter().filter(|(key, _)| !ANNOTATIONS.contains(&key.as_str()));
        match (saying.next(), saying.next()) {
            (Some((key, Value::Array(choices))), None)
                if key == "anyOf" || key == "oneOf" || key == "allOf" && choices.len() == 1 =>
            {
                Some(choices)
            }
            _ => None,
        }
    });
    match choices {
        None => found.push(schema),
        Some(choices) => {
            for choice in choices {
                collect(choice, document, depth + 1, found)?;
            }
        }
    }
    Some(())
}

/// Splits a schema into that of the strings that it allows and that of everything else.
fn split(schema: &Value) -> (Option<Value>, Option<Value>) {
    let with = |key: &str, value: Value| {
        let mut members = schema.as_object().cloned().unwrap_or_default();
        members.insert(key.to_owned(), value);
        Some(Value::Object(members))
    };
    if *schema == Value::Bool(false) {
        return (None, None);
    }
    let both = || {
        let anything = || Value::Object(Map::new());
        let whole = || if schema.is_object() { schema.clone() } else { anything() };
        (Some(whole()), Some(whole()))
    };
    if let Some(value) = schema.get("const") {
        return if value.is_string() { (Some(schema.clone()), None) } else { (None, Some(schema.clone())) };
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        let (texts, others): (Vec<_>, Vec<_>) = values.iter().cloned().partition(Value::is_string);
        let part =
            |values: Vec<Value>| (!values.is_empty()).then(|| with("enum", Value::Array(values))).flatten();
        return (part(texts), part(others));
    }
    match schema.get("type") {
        Some(Value::String(kind)) if kind == "string" => (Some(schema.clone()), None),
        Some(Value::String(_)) => (None, Some(schema.clone())),
        Some(Value::Array(kinds)) => {
            let others: Vec<Value> = kinds.iter().filter(|kind| *kind != "string").cloned().collect();
            let text = (others.len() < kinds.len()).then(|| with("type", json!("string"))).flatten();
            let other = (!others.is_empty()).then(|| with("type", Value::Array(others))).flatten();
            (text, other)
        }
        // If several schemas must all hold, one that allows no strings excludes strings.
        _ => match schema.get("allOf").and_then(Value::as_array) {
            Some(all) if all.iter().any(|one| matches!(split(one), (None, Some(_)))) => {
                (None, Some(schema.clone()))
            }
            _ => both(),
        },
    }
}

/// Returns the regular expression of the whole texts in which a pattern is found, or `None` if its anchors do not stand at
/// the edges of its alternatives.
pub(super) fn anchored(pattern: &str) -> Option<String> {
    let mut whole = Vec::new();
    for alternative in top_level(pattern)? {
        let from_start = alternative.strip_prefix('^');
        let core = from_start.unwrap_or(alternative);
        let to_end = core.strip_suffix('$').filter(|core| !ends_escaped(core));
        let core = to_end.unwrap_or(core);
        if has_anchor(core) {
            return None;
        }
        let before = if from_start.is_some() { "" } else { ANYTHING };
        let behind = if to_end.is_some() { "" } else { ANYTHING };
        whole.push(format!("{before}({core}){behind}"));
    }
    Some(whole.join("|"))
}

/// Returns whether a text ends with an odd number of backslashes.
fn ends_escaped(text: &str) -> bool {
    text.bytes().rev().take_while(|byte| *byte == b'\\').count() % 2 == 1
}

/// Returns the alternatives of a pattern that are not within parentheses.
fn top_level(pattern: &str) -> Option<Vec<&str>> {
    let (mut parts, mut start, mut depth) = (Vec::new(), 0, 0usize);
    for (index, c) in syntax(pattern) {
        match c {
            '(' => depth += 1,
            ')' => depth = depth.checked_sub(1)?,
            '|' if depth == 0 => {
                parts.push(&pattern[start..index]);
                start = index + 1;
            }
            _ => {}
        }
    }
    parts.push(&pattern[start..]);
    (depth == 0).then_some(parts)
}

fn has_anchor(pattern: &str) -> bool {
    syntax(pattern).any(|(_, c)| matches!(c, '^' | '$'))
}

/// Returns the characters of a pattern that are neither escaped nor in a class.
fn syntax(pattern: &str) -> impl Iterator<Item = (usize, char)> {
    let (mut is_escaped, mut in_class) = (false, false);
    pattern.char_indices().filter(move |(_, c)| {
        if std::mem::take(&mut is_escaped) {
            return false;
        }
        match c {
            '\\' => is_escaped = true,
            '[' => in_class = true,
            ']' => in_class = false,
            _ if !in_class => return true,
            _ => {}
        }
        false
    })
}

/// Returns the regular expression of the texts of a schema's format, which are those that JSON has.
pub(super) fn text_format(schema: &Value) -> Option<&'static str> {
    const DATE: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-9]))";
    const TIME: &str =
        "([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]+)?([zZ]|[+\\-]([01][0-9]|2[0-3]):[0-5][0-9])";
    const DATE_TIME: &str = "[0-9]{4}-((0[13578]|1[02])-(0[1-9]|[12][0-9]|3[01])|(0[469]|11)-(0[1-9]|[12][0-9]|30)|02-(0[1-9]|1[0-9]|2[0-9]))[tT]([01][0-9]|2[0-3]):[0-5][0-9]:([0-5][0-9]|60)(\\.[0-9]+)?([zZ]|[+\\-]([01][0-9]|2[0-3]):[0-5][0-9])";
    const UUID: &str = "[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}";
    const IPV4: &str =
        "((25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])";
    const EMAIL: &str = "[a-zA-Z0-9!#$%&'*+\\-/=?\\^_`{|}~]+(\\.[a-zA-Z0-9!#$%&'*+\\-/=?\\^_`{|}~]+)*@[a-zA-Z0-9]([a-zA-Z0-9\\-]*[a-zA-Z0-9])?(\\.[a-zA-Z0-9]([a-zA-Z0-9\\-]*[a-zA-Z0-9])?)*";
    match schema.get("format")?.as_str()? {
        "date" => Some(DATE),
        "time" => Some(TIME),
        "date-time" => Some(DATE_TIME),
        "uuid" => Some(UUID),
        "ipv4" => Some(IPV4),
        "email" => Some(EMAIL),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(schema: Value) -> (usize, Option<Value>) {
        let document = json!({"$defs": {"color": {"enum": ["red", "blue"]}}});
        let WrittenValue { texts, json } = WrittenValue::of(&schema, &document);
        (texts.len(), json)
    }

    #[test]
    fn string_types_are_recognized_through_alternatives() {
        let optional = json!({"anyOf": [{"type": "integer"}, {"type": "null"}], "default": null});
        assert_eq!(written(optional.clone()), (0, Some(optional)));
        let choice = json!({"anyOf": [{"$ref": "#/$defs/color"}, {"type": "null"}], "title": "Color"});
        assert_eq!(written(choice), (1, Some(json!({"type": "null"}))));
        let mixed = json!({"enum": ["a", 1, null]});
        assert_eq!(written(mixed), (1, Some(json!({"enum": [1, null]}))));
        assert_eq!(
            written(json!({"type": ["string", "null"], "maxLength": 3})),
            (1, Some(json!({"type": ["null"], "maxLength": 3})))
        );
        assert_eq!(written(json!({"allOf": [{"type": "string"}]})), (1, None));
        assert_eq!(
            written(json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]})),
            (1, None)
        );
        let both = json!({"allOf": [{"type": "integer"}, {"minimum": 3}]});
        assert_eq!(written(both.clone()), (0, Some(both)));
        let (texts, json) = written(json!({}));
        assert_eq!((texts, json.is_some()), (1, true));
    }

    #[test]
    fn anchors_hold_for_their_own_alternative() {
        for (pattern, whole) in [
            ("^ab$", Some("(ab)".to_owned())),
            ("^(a|b)$", Some("((a|b))".to_owned())),
            ("^a|b$", Some(format!("(a){ANYTHING}|{ANYTHING}(b)"))),
            ("x", Some(format!("{ANYTHING}(x){ANYTHING}"))),
            ("^[$^|]+$", Some("([$^|]+)".to_owned())),
            ("^a\\$", Some(format!("(a\\$){ANYTHING}"))),
            ("(^a)b", None),
            ("a$b", None),
        ] {
            assert_eq!(anchored(pattern), whole, "{pattern}");
        }
    }
}
