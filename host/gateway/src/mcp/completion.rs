//! Completes the arguments of prompts and the variables of resources from what the schemas of their tools allow.

use super::{prompts, scope::Scope};
use rmcp::model::{CompleteRequestParams, CompletionInfo, Reference};
use serde_json::Value;
use skep_runtime::{AgentHost, ToolDefinition};

/// Returns the values that begin with what was typed. They are those of an `enum`, the `examples`, or true and false.
pub(super) fn complete(host: &AgentHost, scope: &Scope, request: &CompleteRequestParams) -> CompletionInfo {
    let Some(tool) = tool(host, scope, &request.r#ref) else { return CompletionInfo::default() };
    let property = resolved(&tool.input_schema, &tool.input_schema["properties"][&request.argument.name]);
    let typed = request.argument.value.as_str();
    let mut found: Vec<String> =
        values(property).into_iter().filter(|value| value.starts_with(typed)).collect();
    let total = u32::try_from(found.len()).ok();
    let has_more = found.len() > CompletionInfo::MAX_VALUES;
    found.truncate(CompletionInfo::MAX_VALUES);
    let mut info = CompletionInfo::default();
    (info.values, info.total, info.has_more) = (found, total, Some(has_more));
    info
}

fn tool(host: &AgentHost, scope: &Scope, reference: &Reference) -> Option<ToolDefinition> {
    match reference {
        Reference::Prompt(prompt) => prompts::find(host, scope, &prompt.name).map(|(_, _, tool)| tool),
        Reference::Resource(resource) => {
            let agent = host.agent(scope.agent.as_deref()?).ok()?;
            let known = agent.mcp.resources.values().find(|known| known.uri.as_str() == resource.uri)?;
            prompts::tool_of(&agent, &known.tool).cloned()
        }
        _ => None,
    }
}

/// Returns the schema that a property refers to, or the property itself.
fn resolved<'a>(root: &'a Value, property: &'a Value) -> &'a Value {
    let place = property["$ref"].as_str().and_then(|place| place.strip_prefix('#'));
    place.and_then(|place| root.pointer(place)).unwrap_or(property)
}

fn values(property: &Value) -> Vec<String> {
    let listed = ["enum", "examples"].iter().find_map(|key| property[*key].as_array());
    match listed {
        Some(listed) => listed.iter().filter(|value| !value.is_null()).map(text).collect(),
        None if property["type"] == "boolean" => vec!["true".to_owned(), "false".to_owned()],
        None => Vec::new(),
    }
}

fn text(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn values_come_from_the_schema() {
        let root = json!({"$defs": {"Day": {"enum": ["mon", "tue", null]}}, "type": "object"});
        for (property, expected) in [
            (json!({"$ref": "#/$defs/Day"}), vec!["mon", "tue"]),
            (json!({"$ref": "#/$defs/Year"}), vec![]),
            (json!({"enum": [1, 2]}), vec!["1", "2"]),
            (json!({"type": "string", "examples": ["tea"]}), vec!["tea"]),
            (json!({"type": "boolean"}), vec!["true", "false"]),
            (json!({"type": "string"}), vec![]),
        ] {
            assert_eq!(values(resolved(&root, &property)), expected, "{property}");
        }
    }
}
