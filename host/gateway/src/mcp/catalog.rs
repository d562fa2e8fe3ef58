//! The agents and their tools as MCP tools, a page at a time.
//!
//! Agents' names have no underscore, so `AGENT__TOOL` is read in one way only.

use crate::access::Caller;
use rmcp::model::{JsonObject, ListToolsResult, MetaObject, Tool, ToolAnnotations};
use serde_json::{Value, json};
use skep_runtime::{AgentDetail, AgentHost, ToolDefinition, ToolHints};
use std::sync::Arc;

const PAGE: usize = 100;
const BETWEEN: &str = "__";
/// Of a tool's `_meta`: a person decides about each call.
const NEEDS_APPROVAL: &str = "skep.dev/needs_approval";

/// What a tool's name means.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target<'a> {
    pub(super) agent: &'a str,
    /// `None`: a message to the agent.
    pub(super) tool: Option<&'a str>,
}

impl<'a> Target<'a> {
    pub(super) fn of(name: &'a str) -> Self {
        match name.split_once(BETWEEN) {
            Some((agent, tool)) => Target { agent, tool: Some(tool) },
            None => Target { agent: name, tool: None },
        }
    }
}

/// The tools that the caller may call after the one with the cursor's name, whether that still exists or not.
pub(super) fn page(host: &AgentHost, caller: &Caller, cursor: Option<&str>) -> ListToolsResult {
    let after = cursor.map(Target::of);
    let agents = host.agents();
    let agents = agents.iter().filter(|agent| caller.reaches(&agent.name));
    let agents = agents.filter(|agent| after.as_ref().is_none_or(|after| agent.name.as_str() >= after.agent));
    let mut tools: Vec<Tool> = Vec::new();
    let mut next_cursor = None;
    // An agent that was removed meanwhile has no tools.
    for agent in agents.filter_map(|agent| host.agent(&agent.name).ok()) {
        for tool in tools_of(&agent) {
            if after.as_ref().is_some_and(|after| Target::of(&tool.name) <= *after) {
                continue;
            }
            if tools.len() == PAGE {
                next_cursor = tools.last().map(|tool| tool.name.to_string());
                return ListToolsResult { next_cursor, ..ListToolsResult::with_all_items(tools) };
            }
            tools.push(tool);
        }
    }
    ListToolsResult { next_cursor, ..ListToolsResult::with_all_items(tools) }
}

/// The agent itself, then its tools by name.
fn tools_of(agent: &AgentDetail) -> Vec<Tool> {
    let name = &agent.summary.name;
    let mut tools: Vec<Tool> = match agent.takes_tool_calls {
        true => agent.tools.iter().map(|tool| described(name, tool)).collect(),
        false => Vec::new(),
    };
    tools.push(conversation(name, &agent.summary.description));
    tools.sort_by(|one, other| one.name.cmp(&other.name));
    tools
}

fn conversation(name: &str, description: &str) -> Tool {
    let input = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string", "description": "The message."},
            "data": {"description": "JSON that goes with the text."},
            "session": {
                "type": "string",
                "minLength": 1,
                "maxLength": 128,
                "description": "The session to go on with. Left out, it is the one of this connection.",
            },
        },
        "required": ["text"],
        "additionalProperties": false,
    });
    let output = json!({
        "type": "object",
        "properties": {
            "text": {"type": "string"},
            "data": {},
            "session": {"type": "string"},
            "turn": {"type": "integer"},
        },
        "required": ["text", "session", "turn"],
    });
    let description = match description {
        "" => format!("Sends a message to the agent {name}."),
        said => said.to_owned(),
    };
    Tool::new(name.to_owned(), description, object(input)).with_raw_output_schema(object(output))
}

fn described(agent: &str, tool: &ToolDefinition) -> Tool {
    let mut input = tool.input_schema.clone();
    // Which the runtime takes for granted and the protocol wants said.
    input["type"] = json!("object");
    let name = format!("{agent}{BETWEEN}{}", tool.name);
    let mut described =
        Tool::new(name, tool.description.clone(), object(input)).with_annotations(annotations(tool.hints));
    if tool.needs_approval {
        let meta = JsonObject::from_iter([(NEEDS_APPROVAL.to_owned(), json!(true))]);
        described = described.with_meta(MetaObject(meta));
    }
    match tool.output_schema.as_ref().and_then(output_schema) {
        Some(schema) => described.with_raw_output_schema(object(schema)),
        None => described,
    }
}

/// All of them are said: what is left out means the worse.
fn annotations(hints: ToolHints) -> ToolAnnotations {
    ToolAnnotations::new()
        .read_only(hints.read_only)
        .destructive(hints.destructive)
        .idempotent(hints.idempotent)
        .open_world(hints.open_world)
}

/// Whether a result is an object as it is; any other is the `result` of one, because clients of the older revisions take
/// nothing else.
pub(super) fn is_object(schema: Option<&Value>) -> bool {
    schema.is_some_and(|schema| schema["type"] == "object")
}

fn output_schema(schema: &Value) -> Option<Value> {
    if is_object(Some(schema)) {
        return Some(schema.clone());
    }
    // What it refers to by a path from the root has to stay at the root, and a schema that refers to its own root cannot
    // be moved.
    if refers_to_root(schema) {
        return None;
    }
    let mut result = schema.clone();
    let mut wrapped = json!({"type": "object", "properties": {}, "required": ["result"]});
    for key in ["$defs", "definitions"] {
        if let Some(definitions) = result.as_object_mut().and_then(|schema| schema.remove(key)) {
            wrapped[key] = definitions;
        }
    }
    wrapped["properties"]["result"] = result;
    Some(wrapped)
}

fn refers_to_root(schema: &Value) -> bool {
    match schema {
        Value::Object(members) => members.iter().any(|(key, value)| match (key.as_str(), value) {
            ("$ref" | "$dynamicRef", Value::String(place)) => {
                !["#/$defs/", "#/definitions/"].iter().any(|known| place.starts_with(known))
            }
            _ => refers_to_root(value),
        }),
        Value::Array(items) => items.iter().any(refers_to_root),
        _ => false,
    }
}

fn object(value: Value) -> Arc<JsonObject> {
    match value {
        Value::Object(members) => Arc::new(members),
        // A schema may be `true`.
        _ => Arc::default(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_read_in_one_way() {
        let targets = [
            ("a", "a", None),
            ("a-b", "a-b", None),
            ("a__t", "a", Some("t")),
            ("a___t", "a", Some("_t")),
            ("a__t__u", "a", Some("t__u")),
            ("a-b__", "a-b", Some("")),
        ];
        for (name, agent, tool) in targets {
            assert_eq!(Target::of(name), Target { agent, tool });
        }
    }

    #[test]
    fn an_output_that_is_no_object_becomes_the_result_of_one() {
        let definitions = json!({"Day": {"enum": ["mon"]}});
        for (schema, expected) in [
            (json!({"type": "object", "title": "A"}), Some(json!({"type": "object", "title": "A"}))),
            (
                json!({"$ref": "#/$defs/Day", "$defs": definitions}),
                Some(json!({
                    "type": "object",
                    "properties": {"result": {"$ref": "#/$defs/Day"}},
                    "required": ["result"],
                    "$defs": definitions,
                })),
            ),
            (
                json!(true),
                Some(json!({"type": "object", "properties": {"result": true}, "required": ["result"]})),
            ),
            (json!({"type": "array", "items": {"$ref": "#"}}), None),
        ] {
            assert_eq!(output_schema(&schema), expected, "{schema}");
        }
    }
}
