//! Lists the agents and their tools as MCP tools, in pages.
//!
//! Names of agents contain no underscore, so `AGENT__TOOL` is unambiguous.

use super::{content, scope::Scope};
use rmcp::model::{JsonObject, ListToolsResult, MetaObject, Tool, ToolAnnotations};
use serde_json::{Value, json};
use skep_runtime::{AgentDetail, AgentHost, ToolDefinition, ToolHints};
use std::sync::Arc;

/// Maximum number of entries of one page of any list.
pub(super) const PAGE: usize = 100;
const BETWEEN: &str = "__";
/// The key of a tool's `_meta` that says that each call needs an approval.
const NEEDS_APPROVAL: &str = "skep.dev/needs_approval";

/// The agent, and the agent's tool, that an MCP tool name refers to.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Target<'a> {
    pub(super) agent: &'a str,
    /// The agent's tool, or `None` for a message to the agent.
    pub(super) tool: Option<&'a str>,
}

impl<'a> Target<'a> {
    pub(super) fn of(name: &'a str) -> Self {
        match name.split_once(BETWEEN) {
            Some((agent, tool)) => Target { agent, tool: Some(tool) },
            None => Target { agent: name, tool: None },
        }
    }

    /// Returns the name of a tool or a prompt of an agent among those of all agents.
    pub(super) fn name(agent: &str, own: &str) -> String {
        format!("{agent}{BETWEEN}{own}")
    }
}

/// Returns a page of the tools in a scope. The page starts after the name in the cursor, whether or not that tool still
/// exists.
pub(super) fn page(host: &AgentHost, scope: &Scope, cursor: Option<&str>) -> ListToolsResult {
    let after = cursor.map(|cursor| scope.target(cursor));
    let agents = scope.agents(host);
    let agents =
        agents.iter().filter(|agent| after.as_ref().is_none_or(|after| agent.as_str() >= after.agent));
    let mut tools: Vec<Tool> = Vec::new();
    let mut next_cursor = None;
    // An agent that has been removed in the meantime has no tools.
    for agent in agents.filter_map(|agent| host.agent(agent).ok()) {
        for tool in tools_of(&agent, scope) {
            if after.as_ref().is_some_and(|after| scope.target(&tool.name) <= *after) {
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

/// Returns the agent's tools, sorted by name, without those that make prompts and resources. Among all agents, the tool
/// for messages to the agent is one of them.
fn tools_of(agent: &AgentDetail, scope: &Scope) -> Vec<Tool> {
    let name = &agent.summary.name;
    let called = agent.tools.iter().filter(|tool| agent.takes_tool_calls && !agent.mcp.uses(&tool.name));
    let mut tools: Vec<Tool> = called.map(|tool| described(scope.name(name, &tool.name), tool)).collect();
    if scope.agent.is_none() {
        tools.push(conversation(name, &agent.summary.description));
    }
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
                "description": "The session to continue. Defaults to the session of this connection.",
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

fn described(name: String, tool: &ToolDefinition) -> Tool {
    let mut input = tool.input_schema.clone();
    // The runtime implies the type, but the protocol requires it.
    input["type"] = json!("object");
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

/// Sets all hints explicitly, because a missing hint means the less safe value.
fn annotations(hints: ToolHints) -> ToolAnnotations {
    ToolAnnotations::new()
        .read_only(hints.read_only)
        .destructive(hints.destructive)
        .idempotent(hints.idempotent)
        .open_world(hints.open_world)
}

/// Returns whether a result is an object and is returned as it is. Any other value is wrapped as the `result` of an object,
/// because clients of older revisions accept only objects.
pub(super) fn is_object(schema: Option<&Value>) -> bool {
    schema.is_some_and(|schema| schema["type"] == "object")
}

fn output_schema(schema: &Value) -> Option<Value> {
    // A result that consists of parts is not structured.
    if content::is_marked(schema) {
        return None;
    }
    if is_object(Some(schema)) {
        return Some(schema.clone());
    }
    // Definitions that are referenced by a path from the root must stay at the root, and a schema that refers to its
    // own root cannot be wrapped.
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
    fn tool_names_are_unambiguous() {
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
    fn an_output_that_is_not_an_object_is_wrapped() {
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
