//! Declarations of tools as a namespace of TypeScript types, which the templates of Kimi K2.5 and its successors get in the
//! variable `tools_ts_str`.
//!
//! The models were trained on exactly this text: required members before optional ones, each group by name; descriptions,
//! constraints and defaults as comments above their member; definitions as interfaces.

use serde_json::{Map, Value};
use skep_model::spelled_json;
use std::fmt::Write;

/// The variable of a template that takes the declarations.
pub(super) const VARIABLE: &str = "tools_ts_str";
const INDENT: &str = "  ";
/// The constraints that comments show, by the type that has them.
const CONSTRAINTS: [(&str, &[&str]); 4] = [
    ("array", &["maxItems", "minItems"]),
    ("integer", &["maximum", "minimum"]),
    ("number", &["maximum", "minimum"]),
    ("string", &["maxLength", "minLength", "pattern"]),
];

/// Returns the declarations of tools in OpenAI's form. Returns `None` if a schema has a keyword that they cannot express,
/// such as a reference to elsewhere; templates then show the tools as JSON.
pub(super) fn declarations(tools: &[Value]) -> Option<String> {
    let functions = tools.iter().map(|tool| function(&tool["function"]));
    let functions: Vec<String> = functions.collect::<Option<_>>()?;
    Some(format!("# Tools\n\n## functions\nnamespace functions {{\n{}\n}}\n", functions.join("\n")))
}

fn function(function: &Value) -> Option<String> {
    let mut scope = Scope::default();
    let empty = Map::new();
    let parameters = function["parameters"].as_object().unwrap_or(&empty);
    let whole = scope.object(parameters, "")?;
    let mut lines = Vec::new();
    let parameter = if scope.refers_to_whole {
        let members = scope.members(parameters, "")?.into_iter().map(|member| member.text);
        let members: Vec<String> = members.collect();
        let members = if members.is_empty() { String::new() } else { format!("\n{}\n", members.join(",\n")) };
        lines.push(format!("interface parameters {{{members}}}"));
        "parameters".to_owned()
    } else {
        whole
    };
    let mut index = 0;
    // Definitions may contain further definitions.
    while let Some((name, schema)) = scope.definitions.get(index).copied() {
        let text = scope.text(schema, "")?;
        lines.push(format!("{}interface {name} {text}", described(schema, "")));
        index += 1;
    }
    if let Some(text) = function["description"].as_str().filter(|text| !text.is_empty()) {
        lines.push(comment(text, ""));
    }
    lines.push(format!("type {} = (_: {parameter}) => any;", function["name"].as_str()?));
    Some(lines.join("\n"))
}

/// The definitions that a function's schema may refer to.
#[derive(Default)]
struct Scope<'a> {
    definitions: Vec<(&'a str, &'a Value)>,
    /// Whether a reference means the whole schema.
    refers_to_whole: bool,
}

/// A member of an object.
struct Member<'a> {
    name: &'a str,
    is_required: bool,
    text: String,
}

impl<'a> Scope<'a> {
    /// Returns the type that a schema describes.
    fn text(&mut self, schema: &'a Value, indent: &str) -> Option<String> {
        let schema = match schema {
            Value::Bool(true) => return Some("any".to_owned()),
            Value::Bool(false) => return Some("null".to_owned()),
            Value::Object(schema) => schema,
            _ => return None,
        };
        if let Some(reference) = schema.get("$ref") {
            return self.reference(reference.as_str()?);
        }
        if let Some(types) = schema.get("anyOf") {
            let types = types.as_array()?.iter().map(|schema| self.text(schema, indent));
            return Some(types.collect::<Option<Vec<_>>>()?.join(" | "));
        }
        if let Some(values) = schema.get("enum") {
            let values = values.as_array()?.iter().map(|value| match value {
                Value::String(text) => Some(format!("\"{text}\"")),
                Value::Array(_) | Value::Object(_) => None,
                value => Some(spelled(value)),
            });
            return Some(values.collect::<Option<Vec<_>>>()?.join(" | "));
        }
        match schema.get("type") {
            None if schema.is_empty() => Some("any".to_owned()),
            None => None,
            Some(Value::Array(kinds)) => {
                let kinds = kinds.iter().map(|kind| match kind.as_str()? {
                    "object" => Some("{}"),
                    "array" => Some("Array<any>"),
                    kind @ ("string" | "number" | "integer" | "boolean" | "null") => Some(scalar(kind)),
                    _ => None,
                });
                Some(kinds.collect::<Option<Vec<_>>>()?.join(" | "))
            }
            Some(kind) => match kind.as_str()? {
                "object" => self.object(schema, indent),
                "array" => self.array(schema, indent),
                kind => Some(scalar(kind).to_owned()),
            },
        }
    }

    fn reference(&mut self, reference: &str) -> Option<String> {
        if reference == "#" {
            self.refers_to_whole = true;
            return Some("parameters".to_owned());
        }
        let name = reference.strip_prefix("#/$defs/")?.rsplit('/').next()?;
        self.definitions.iter().any(|(known, _)| *known == name).then(|| name.to_owned())
    }

    fn array(&mut self, schema: &'a Map<String, Value>, indent: &str) -> Option<String> {
        let Some(items) = schema.get("items").filter(|items| !is_empty(items)) else {
            return Some("Array<any>".to_owned());
        };
        let deeper = format!("{indent}{INDENT}");
        let comments = comments(items, &deeper);
        if comments.is_empty() {
            return Some(format!("Array<{}>", self.text(items, indent)?));
        }
        Some(format!("Array<\n{comments}{deeper}{}\n{indent}>", self.text(items, &deeper)?))
    }

    fn object(&mut self, schema: &'a Map<String, Value>, indent: &str) -> Option<String> {
        if let Some(definitions) = schema.get("$defs") {
            for (name, definition) in definitions.as_object()? {
                match self.definitions.iter_mut().find(|(known, _)| known == name) {
                    Some(known) => known.1 = definition,
                    None => self.definitions.push((name, definition)),
                }
            }
        }
        let deeper = format!("{indent}{INDENT}");
        let mut members = self.members(schema, indent)?;
        members.sort_by_key(|member| (!member.is_required, member.name));
        let mut lines: Vec<String> = members.into_iter().map(|member| member.text).collect();
        let rest = match schema.get("additionalProperties") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(true)) => Some("any".to_owned()),
            Some(Value::Bool(false)) => Some("never".to_owned()),
            Some(rest) => Some(self.text(rest, &deeper)?),
        };
        lines.extend(rest.map(|kind| format!("{deeper}[k: string]: {kind}")));
        match lines.as_slice() {
            [] => Some("{}".to_owned()),
            lines => Some(format!("{{\n{}\n{indent}}}", lines.join(",\n"))),
        }
    }

    /// Returns the members of an object in the order of the schema.
    fn members(&mut self, schema: &'a Map<String, Value>, indent: &str) -> Option<Vec<Member<'a>>> {
        let Some(properties) = schema.get("properties") else { return Some(Vec::new()) };
        let required = schema.get("required").and_then(Value::as_array);
        let deeper = format!("{indent}{INDENT}");
        let member = |(name, schema): (&'a String, &'a Value)| {
            let is_required = required.is_some_and(|names| names.iter().any(|known| known == name));
            let mut text = comments(schema, &deeper);
            if let Some(default) = schema.get("default").filter(|default| !default.is_null()) {
                let _ = writeln!(text, "{deeper}// Default: {}", spelled(default));
            }
            let optional = if is_required { "" } else { "?" };
            let _ = write!(text, "{deeper}{name}{optional}: {}", self.text(schema, &deeper)?);
            Some(Member { name, is_required, text })
        };
        properties.as_object()?.iter().map(member).collect()
    }
}

/// Returns a value in the words of Python, as the models have seen it.
fn spelled(value: &Value) -> String {
    match value {
        Value::Null => "None".to_owned(),
        Value::Bool(true) => "True".to_owned(),
        Value::Bool(false) => "False".to_owned(),
        value => spelled_json(value),
    }
}

fn scalar(kind: &str) -> &str {
    if kind == "integer" { "number" } else { kind }
}

fn is_empty(schema: &Value) -> bool {
    schema.is_null() || schema.as_object().is_some_and(Map::is_empty)
}

/// Returns the lines above a type: its description and its constraints.
fn comments(schema: &Value, indent: &str) -> String {
    let mut lines = described(schema, indent);
    let is_plain = ["$ref", "anyOf", "enum"].iter().all(|keyword| schema.get(keyword).is_none());
    let kind = schema["type"].as_str().filter(|_| is_plain);
    let names = CONSTRAINTS.iter().find(|(name, _)| Some(*name) == kind).map_or(&[][..], |(_, names)| names);
    let constraints = names.iter().filter_map(|name| match schema.get(name)? {
        Value::String(text) => Some(format!("{name}: {text}")),
        value => Some(format!("{name}: {}", spelled_json(value))),
    });
    let constraints = constraints.collect::<Vec<_>>().join(", ");
    if !constraints.is_empty() {
        let _ = writeln!(lines, "{indent}// {constraints}");
    }
    lines
}

fn described(schema: &Value, indent: &str) -> String {
    let text = schema["description"].as_str().filter(|text| !text.is_empty());
    text.map_or_else(String::new, |text| comment(text, indent) + "\n")
}

/// Returns a text as comments. Empty lines stay empty.
fn comment(text: &str, indent: &str) -> String {
    let lines = text.split('\n').map(|line| match line {
        "" => String::new(),
        line => format!("{indent}// {line}"),
    });
    lines.collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Tools and their declarations by an independent implementation, which `typescript.py` beside the file has run.
    const GOLDEN: &str = include_str!("../../../../tests/fixtures/chat-templates/typescript.json");

    #[test]
    fn declarations_are_those_of_an_independent_implementation() {
        let cases: Vec<Value> = serde_json::from_str(GOLDEN).unwrap();
        assert!(cases.len() > 50);
        let mut expressed = 0;
        for case in &cases {
            let tools = case["tools"].as_array().unwrap();
            let expected = case["declarations"].as_str();
            assert_eq!(declarations(tools).as_deref(), expected, "{}", case["tools"]);
            expressed += usize::from(expected.is_some());
        }
        assert!(expressed > 40, "{expressed} of {}", cases.len());
    }

    #[test]
    fn a_schema_that_cannot_be_expressed_has_no_declaration() {
        for parameters in [
            json!({"properties": {"a": {"$ref": "https://example.com/a"}}}),
            json!({"properties": {"a": {"$ref": "#/$defs/unknown"}}}),
            json!({"properties": {"a": {"allOf": []}}}),
            json!({"properties": {"a": {"type": ["thing"]}}}),
        ] {
            assert_eq!(declarations(&[json!({"function": {"name": "f", "parameters": parameters}})]), None);
        }
    }
}
