//! Grammar rules for the parts of a document that the JSON Schema compiler cannot write: objects whose properties
//! come in any order. These parts are written as rules, together with everything that contains them; the rest
//! stays `%json`.
//!
//! Invariant: the rules accept what the schema accepts, in more spellings. If the structure on the path to such
//! a part is not plain (`allOf`, patterns, counts of properties), there are no rules, and the compiler's own
//! grammar is used.

use std::collections::{HashMap, HashSet};
use std::fmt::Write;

use serde_json::{Map, Value, json};

use super::canonical::{children, standing_alone, target};
use super::relaxed::RelaxedSchema;
use super::schema_keywords::Members;
use super::spelling::{AcceptedSpelling, Spelling, WHITE_SPACE};

/// Maximum number of properties in any order. More would take too many states, so they come in the order of the
/// schema.
pub(super) const MAX_IN_ANY_ORDER: usize = 8;
/// Maximum number of rules of one document.
const MAX_RULES: usize = 4000;
/// Maximum nesting of schemas that are looked through.
const MAX_DEPTH: usize = 64;

/// Patterns for `\u` escapes of control characters, and of all characters, with surrogates in pairs.
const CONTROL_ESCAPE: &str = r"|\\u00([01][0-9a-fA-F]|7[fF])";
const ANY_ESCAPE: &str = concat!(
    r"|\\u([0-9a-ce-fA-CE-F][0-9a-fA-F]{3}|[dD][0-7][0-9a-fA-F]{2}",
    r"|[dD][89aAbB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2})"
);

const KEY_ORDER: &str = "x-key-order";

/// Returns the rules of a document as a separate grammar; `None` if none are needed or possible.
pub(super) fn rules(part: &RelaxedSchema, written: AcceptedSpelling) -> Option<String> {
    let schema = &part.schema;
    let mut rule_grammar = RuleGrammar {
        document: schema,
        unicode_escapes: part.unicode_escapes,
        written,
        rules: String::new(),
        count: 0,
        leaves: HashMap::new(),
        references: HashMap::new(),
    };
    if !rule_grammar.is_wanted(schema, &mut HashSet::new(), 0) {
        return None;
    }
    rule_grammar.references.insert("#".to_string(), "start".to_string());
    let body = rule_grammar.value(schema)?;
    let mut grammar = String::from("%llguidance {\"ignore_once\": true}\n");
    if written == AcceptedSpelling::Any {
        writeln!(grammar, "%ignore /{WHITE_SPACE}/").ok()?;
    }
    writeln!(grammar, "start: {body}").ok()?;
    grammar.push_str(&rule_grammar.rules);
    Some(grammar)
}

struct RuleGrammar<'a> {
    document: &'a Value,
    unicode_escapes: bool,
    written: AcceptedSpelling,
    rules: String,
    count: usize,
    /// Rules of schemas that the compiler writes, by the text of the schema.
    leaves: HashMap<String, String>,
    references: HashMap<String, String>,
}

/// A property of an object: its name, its schema and whether it is required.
type Entry<'a> = (&'a str, &'a Value, bool);

static ANYTHING: Value = Value::Bool(true);

impl<'a> RuleGrammar<'a> {
    /// Returns whether anything within the schema, reached by plain structure only, has to be written as rules.
    fn is_wanted(&self, schema: &Value, seen: &mut HashSet<String>, depth: usize) -> bool {
        let Some(members) = schema.as_object().filter(|_| depth <= MAX_DEPTH) else { return false };
        if let Some(reference) = lone_reference(members) {
            let leads_to = || self.document.pointer(target(reference));
            return seen.insert(reference.to_string())
                && leads_to().is_some_and(|schema| self.is_wanted(schema, seen, depth + 1));
        }
        if is_in_any_order(members) {
            return true;
        }
        let mut any = |schemas: Vec<&Value>| schemas.into_iter().any(|s| self.is_wanted(s, seen, depth + 1));
        if let Some(alternatives) = lone_alternatives(members) {
            return any(alternatives.iter().collect());
        }
        if is_plain_object(members) {
            return any(members
                .get("properties")
                .and_then(Value::as_object)
                .into_iter()
                .flat_map(Map::values)
                .collect())
                || members.get("additionalProperties").is_some_and(|schema| any(vec![schema]));
        }
        is_plain_array(members) && members.get("items").is_some_and(|schema| any(vec![schema]))
    }

    /// Returns an expression for the schema's values.
    fn value(&mut self, schema: &'a Value) -> Option<String> {
        let members = match schema.as_object() {
            Some(members) if self.is_wanted(schema, &mut HashSet::new(), 0) => members,
            _ => return self.leaf(schema),
        };
        if let Some(reference) = lone_reference(members) {
            return self.reference(reference);
        }
        if let Some(alternatives) = lone_alternatives(members) {
            let alternatives: Option<Vec<String>> =
                alternatives.iter().map(|schema| self.value(schema)).collect();
            return self.rule(&alternatives?.join(" | "));
        }
        if is_plain_object(members) {
            return self.object(members);
        }
        self.array(members)
    }

    fn reference(&mut self, reference: &str) -> Option<String> {
        if let Some(name) = self.references.get(reference) {
            return Some(name.clone());
        }
        let name = format!("definition_{}", self.references.len());
        self.references.insert(reference.to_string(), name.clone());
        let body = self.value(self.document.pointer(target(reference))?)?;
        writeln!(self.rules, "{name}: {body}").ok()?;
        Some(name)
    }

    fn array(&mut self, members: &'a Members) -> Option<String> {
        let number = |key: &str| members.get(key).and_then(Value::as_u64);
        let (least, most) = (number("minItems").unwrap_or(0), number("maxItems"));
        if most.is_some_and(|most| most < least.max(1)) {
            return None;
        }
        let item = self.value(members.get("items").unwrap_or(&ANYTHING))?;
        let comma = self.comma();
        let end = most.map_or(String::new(), |most| (most - 1).to_string());
        let more = match (least.saturating_sub(1), most) {
            (0, None) => format!("({comma} {item})*"),
            (0, Some(1)) => String::new(),
            (least, _) => format!("({comma} {item}){{{least},{end}}}"),
        };
        let items = format!("{item} {more}");
        match least {
            0 => self.rule(&format!("\"[\" ({items})? \"]\"")),
            _ => self.rule(&format!("\"[\" {items} \"]\"")),
        }
    }

    fn object(&mut self, members: &'a Members) -> Option<String> {
        let described = members.get("properties").and_then(Value::as_object);
        let required: Vec<&'a str> = members
            .get("required")
            .and_then(Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .collect();
        let is_described = |name: &str| described.is_some_and(|described| described.contains_key(name));
        let additional = additional(members);
        let mut entries: Vec<Entry<'a>> = described
            .into_iter()
            .flatten()
            .map(|(name, schema)| (name.as_str(), schema, required.contains(&name.as_str())))
            .collect();
        for name in required.iter().copied().filter(|name| !is_described(name)) {
            if !entries.iter().any(|(known, ..)| *known == name) {
                entries.push((name, additional?, true));
            }
        }
        // An impossible property may be left out, but its name stays taken.
        entries.retain(|(_, schema, required)| *required || *schema != &Value::Bool(false));
        let names: Vec<&str> =
            described.into_iter().flat_map(Map::keys).map(String::as_str).chain(required).collect();
        let more = match additional {
            Some(schema) => Some(self.additional(&names, schema)?),
            None => None,
        };
        let mut items = Vec::new();
        for (name, schema, required) in &entries {
            let value = self.value(schema)?;
            let name = literal(&Value::from(*name).to_string());
            items.push((self.rule(&format!("{name} {} {value}", self.colon()))?, *required));
        }
        let body = match is_in_any_order(members) && items.len() <= MAX_IN_ANY_ORDER {
            true => self.in_any_order(&items, more.as_deref())?,
            false => self.in_order(&items, more.as_deref())?,
        };
        self.rule(&format!("\"{{\" {body} \"}}\""))
    }

    /// Returns a rule for a property that is not described: its name is not among `names`, however it is
    /// written.
    fn additional(&mut self, names: &[&str], schema: &'a Value) -> Option<String> {
        let value = self.value(schema)?;
        let terminal = format!("NAME_{}", self.count);
        let speaks_control = |name: &&str| name.contains(|c: char| c.is_ascii_control());
        // The name may be spelled in any way only if no name is taken.
        let escapes = match (names.is_empty(), names.iter().any(speaks_control)) {
            _ if !self.unicode_escapes => "",
            (true, _) => ANY_ESCAPE,
            (false, false) => CONTROL_ESCAPE,
            (false, true) => "",
        };
        let any = format!(r#"/"([^"\\\x00-\x1F\x7F]|\\["\\bfnrt]{escapes})*"/"#);
        let taken = names.iter().map(|name| literal(&Value::from(*name).to_string())).collect::<Vec<_>>();
        match taken.is_empty() {
            true => writeln!(self.rules, "{terminal}: {any}").ok()?,
            false => writeln!(self.rules, "{terminal}: {any} & ~({})", taken.join(" | ")).ok()?,
        }
        self.rule(&format!("{terminal} {} {value}", self.colon()))
    }

    fn in_order(&mut self, items: &[(String, bool)], more: Option<&str>) -> Option<String> {
        let comma = self.comma();
        // The text after the last property: `behind` follows a property, `first` has none before it.
        let mut behind = self.rule(&more.map_or("\"\"".to_string(), |more| format!("({comma} {more})*")))?;
        let mut first = match more {
            Some(more) => self.rule(&format!("({more} {behind})?"))?,
            None => behind.clone(),
        };
        for (item, required) in items.iter().rev() {
            let begun = format!("{item} {behind}");
            (first, behind) = match required {
                true => (self.rule(&begun)?, self.rule(&format!("{comma} {item} {behind}"))?),
                false => (
                    self.rule(&format!("{begun} | {first}"))?,
                    self.rule(&format!("({comma} {item})? {behind}"))?,
                ),
            };
        }
        Some(first)
    }

    /// Writes a rule for each set of properties that are already present. Properties that are not described
    /// come last.
    fn in_any_order(&mut self, items: &[(String, bool)], more: Option<&str>) -> Option<String> {
        let comma = self.comma();
        let last = more.map_or("\"\"".to_string(), |more| format!("({comma} {more})*"));
        let only = more.map_or("\"\"".to_string(), |more| format!("({more} ({comma} {more})*)?"));
        let all = (1_usize << items.len()) - 1;
        let mut states = vec![String::new(); all + 1];
        for there in (0..=all).rev() {
            let missing = |index: &usize| there >> index & 1 == 0;
            let separator = if there == 0 { String::new() } else { format!("{comma} ") };
            let mut ways: Vec<String> = (0..items.len())
                .filter(missing)
                .map(|index| format!("{separator}{} {}", items[index].0, states[there | 1 << index]))
                .collect();
            if items.iter().enumerate().all(|(index, (_, required))| !required || !missing(&index)) {
                ways.push(if there == 0 { only.clone() } else { last.clone() });
            }
            states[there] = self.rule(&ways.join(" | "))?;
        }
        Some(states[0].clone())
    }

    /// Returns a rule for a schema that the compiler writes itself.
    fn leaf(&mut self, schema: &Value) -> Option<String> {
        let alone = match schema {
            Value::Object(_) => standing_alone(schema, self.document),
            Value::Bool(true) => json!({}),
            _ => return None,
        };
        let text = self.written.schema(&alone, self.unicode_escapes).to_string();
        if let Some(name) = self.leaves.get(&text) {
            return Some(name.clone());
        }
        let name = self.rule(&format!("%json {text}"))?;
        self.leaves.insert(text, name.clone());
        Some(name)
    }

    fn rule(&mut self, body: &str) -> Option<String> {
        self.count += 1;
        if self.count > MAX_RULES {
            return None;
        }
        let name = format!("r{}", self.count);
        writeln!(self.rules, "{name}: {body}").ok()?;
        Some(name)
    }

    fn comma(&self) -> &'static str {
        if self.written == AcceptedSpelling::Single(Spelling::Spaced) { "\", \"" } else { "\",\"" }
    }

    fn colon(&self) -> &'static str {
        if self.written == AcceptedSpelling::Single(Spelling::Spaced) { "\": \"" } else { "\":\"" }
    }
}

fn only_has(members: &Members, keys: &[&str]) -> bool {
    members.keys().all(|key| keys.contains(&key.as_str()) || key == "$defs" || key == "$schema")
}

fn lone_reference(members: &Members) -> Option<&str> {
    only_has(members, &["$ref"]).then(|| members.get("$ref")?.as_str()).flatten()
}

fn lone_alternatives(members: &Members) -> Option<&Vec<Value>> {
    only_has(members, &["anyOf"]).then(|| members.get("anyOf")?.as_array()).flatten()
}

fn is_in_any_order(members: &Members) -> bool {
    members.get(KEY_ORDER).is_some_and(|order| order == "any") && is_plain_object(members)
}

fn is_plain_object(members: &Members) -> bool {
    let patterns = members.get("patternProperties").and_then(Value::as_object);
    members.get("type").is_some_and(|kind| kind == "object")
        && only_has(
            members,
            &["type", "properties", "required", "additionalProperties", "patternProperties", KEY_ORDER],
        )
        && patterns.is_none_or(|patterns| patterns.len() == 1 && patterns.get("") == Some(&ANYTHING))
}

fn is_plain_array(members: &Members) -> bool {
    members.get("type").is_some_and(|kind| kind == "array")
        && only_has(members, &["type", "items", "minItems", "maxItems"])
}

/// Returns the schema of properties that are not described; `None` if there may be no others.
fn additional(members: &Members) -> Option<&Value> {
    // Open objects have a pattern that matches every name.
    let by_pattern = members.get("patternProperties").and_then(|patterns| patterns.get(""));
    by_pattern.or_else(|| match members.get("additionalProperties") {
        Some(Value::Bool(false)) => None,
        Some(schema) => Some(schema),
        None => Some(&ANYTHING),
    })
}

/// Removes the keyword for the order of properties, which the compiler does not know.
pub(super) fn without_key_order(schema: &mut Value) {
    match schema {
        Value::Object(members) => {
            members.remove(KEY_ORDER);
            members
                .iter_mut()
                .filter(|(key, _)| !matches!(key.as_str(), "const" | "enum"))
                .for_each(|(_, value)| without_key_order(value));
        }
        Value::Array(items) => items.iter_mut().for_each(without_key_order),
        _ => {}
    }
}

fn literal(text: &str) -> String {
    Value::from(text).to_string()
}

/// Collects warnings about requests for any order that are not followed. `has_rules` says that there are rules
/// for the document.
pub(super) fn order_warnings(schema: &Value, at: &str, has_rules: bool, found: &mut Vec<String>) {
    if let Some(members) = schema.as_object().filter(|members| members.contains_key(KEY_ORDER)) {
        let count = members.get("properties").and_then(Value::as_object).map_or(0, Map::len);
        let location = format!("`{KEY_ORDER}` at `{at}/{KEY_ORDER}`");
        if count > MAX_IN_ANY_ORDER {
            found.push(format!(
                "{location} is possible only for at most {MAX_IN_ANY_ORDER} properties, but there are {count}; \
                 they come in the order of the schema"
            ));
        } else if !has_rules {
            found.push(format!(
                "{location} is possible only if nothing but `properties`, `required`, `additionalProperties`, \
                 `items`, `anyOf` and `$ref` leads to it; the properties come in the order of the schema"
            ));
        }
    }
    for (_, location, child) in children(schema, at) {
        order_warnings(child, &location, has_rules, found);
    }
}
