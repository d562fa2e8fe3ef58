//! Prompts: those that agents declare under `[mcp.prompts]`, each written by one of the agent's tools.

use super::{
    call::{self, Client},
    catalog::{PAGE, Target},
    content,
    scope::Scope,
};
use rmcp::{
    ErrorData, RoleServer,
    model::{
        ContentBlock, GetPromptRequestParams, GetPromptResult, JsonObject, ListPromptsResult, Prompt,
        PromptArgument, PromptMessage, Role,
    },
    service::RequestContext,
};
use serde_json::{Value, json};
use skep_engine::{Dialect, SchemaValidator};
use skep_runtime::{AgentDetail, AgentHost, PromptToml, ToolDefinition};
use std::cell::LazyCell;

/// Returns a page of the prompts in a scope. The page starts after the name in the cursor.
pub(super) fn page(host: &AgentHost, scope: &Scope, cursor: Option<&str>) -> ListPromptsResult {
    let after = cursor.map(|cursor| scope.target(cursor));
    let mut prompts: Vec<Prompt> = Vec::new();
    // An agent that has been removed in the meantime has no prompts.
    for agent in scope.agents(host).iter().filter_map(|agent| host.agent(agent).ok()) {
        for (name, prompt) in &agent.mcp.prompts {
            let target = Target { agent: &agent.summary.name, tool: Some(name) };
            if after.as_ref().is_some_and(|after| target <= *after) {
                continue;
            }
            let Some(tool) = tool_of(&agent, &prompt.tool) else { continue };
            if prompts.len() == PAGE {
                let next_cursor = prompts.last().map(|prompt| prompt.name.clone());
                return ListPromptsResult { next_cursor, ..ListPromptsResult::with_all_items(prompts) };
            }
            prompts.push(described(scope.name(target.agent, name), prompt, tool));
        }
    }
    ListPromptsResult::with_all_items(prompts)
}

/// Lets the agent's tool write a prompt.
pub(super) async fn get(
    client: Client<'_>,
    scope: &Scope,
    request: GetPromptRequestParams,
    context: &RequestContext<RoleServer>,
) -> Result<GetPromptResult, ErrorData> {
    let found = find(client.host, scope, &request.name);
    let (agent, prompt, tool) = found.ok_or_else(|| unknown(&request.name))?;
    let arguments = arguments(request.arguments.unwrap_or_default(), &tool);
    let result = call::result_of(&client, scope, &agent, &tool, arguments, context, "prompt").await?;
    let messages = messages(result, &tool).map_err(|error| call::failed(&error))?;
    Ok(GetPromptResult::new(messages).with_description(prompt.description.unwrap_or(tool.description)))
}

/// Returns a prompt of the scope: its agent, its declaration and the tool that writes it.
pub(super) fn find(
    host: &AgentHost,
    scope: &Scope,
    name: &str,
) -> Option<(String, PromptToml, ToolDefinition)> {
    let target = scope.target(name);
    let agent = host.agent(target.agent).ok().filter(|_| scope.includes(target.agent))?;
    let prompt = agent.mcp.prompts.get(target.tool?)?;
    let tool = tool_of(&agent, &prompt.tool)?;
    Some((target.agent.to_owned(), prompt.clone(), tool.clone()))
}

pub(super) fn tool_of<'a>(agent: &'a AgentDetail, name: &str) -> Option<&'a ToolDefinition> {
    agent.tools.iter().find(|tool| tool.name == name)
}

fn described(name: String, prompt: &PromptToml, tool: &ToolDefinition) -> Prompt {
    let required = |name: &str| {
        tool.input_schema["required"].as_array().is_some_and(|names| names.iter().any(|known| known == name))
    };
    let properties = tool.input_schema["properties"].as_object();
    let arguments = properties.into_iter().flatten().map(|(name, property)| {
        let argument = PromptArgument::new(name.clone()).with_required(required(name));
        match property["description"].as_str() {
            Some(description) => argument.with_description(description),
            None => argument,
        }
    });
    let description = prompt.description.clone().unwrap_or_else(|| tool.description.clone());
    Prompt::new(name, Some(description), Some(arguments.collect()))
}

/// Returns the arguments of a prompt, or the variables of a resource, as arguments of its tool. They are texts; where the
/// tool takes no text, or not this one, the text is read as JSON.
pub(super) fn arguments(given: JsonObject, tool: &ToolDefinition) -> JsonObject {
    let schema = &tool.input_schema;
    let of_one = LazyCell::new(|| schema_of_one_argument(schema));
    let takes_text = |name: &str, text: &str| match &schema["properties"][name] {
        Value::Null => false,
        property if property["type"] == "string" => true,
        _ => of_one.as_ref().is_some_and(|of_one| of_one.check(&json!({ name: text })).is_ok()),
    };
    let read = |(name, value): (String, Value)| {
        let parsed = match &value {
            Value::String(text) if !takes_text(&name, text) => serde_json::from_str(text).ok(),
            _ => None,
        };
        (name, parsed.unwrap_or(value))
    };
    given.into_iter().map(read).collect()
}

/// Returns what a schema demands of its properties, each by itself, with the definitions that they may refer to.
fn schema_of_one_argument(schema: &Value) -> Option<SchemaValidator> {
    let of_properties = |key: &str| matches!(key, "$defs" | "definitions" | "properties");
    let parts = schema.as_object()?.iter().filter(|(key, _)| of_properties(key));
    let parts: JsonObject = parts.map(|(key, part)| (key.clone(), part.clone())).collect();
    SchemaValidator::compile(&Value::Object(parts), Dialect::Linear).ok()
}

fn messages(result: Value, tool: &ToolDefinition) -> Result<Vec<PromptMessage>, skep_runtime::RuntimeError> {
    if content::has_parts(tool) {
        let parts = content::parts(&result)?.into_iter();
        return Ok(parts.map(|part| PromptMessage::new(part.role, part.block)).collect());
    }
    let text = result.as_str().map_or_else(|| result.to_string(), str::to_owned);
    Ok(vec![PromptMessage::new(Role::User, ContentBlock::text(text))])
}

fn unknown(name: &str) -> ErrorData {
    let name: String = name.chars().take(160).collect();
    ErrorData::invalid_params(
        format!("unknown prompt {name:?}; prompts/list lists the available prompts"),
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_runtime::ToolHints;

    #[test]
    fn arguments_stay_texts_where_the_tool_takes_the_text() {
        let input_schema = json!({
            "$defs": {"Size": {"enum": ["1", "2"]}},
            "type": "object",
            "properties": {
                "title": {"type": "string"},
                "note": {"type": ["string", "null"]},
                "place": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "size": {"$ref": "#/$defs/Size"},
                "anything": {},
                "count": {"type": ["integer", "null"]},
                "level": {"enum": [1, 2]},
                "quick": {"type": "boolean"},
                "tags": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["title", "count"],
        });
        let tool = ToolDefinition {
            name: "write".into(),
            description: String::new(),
            input_schema,
            output_schema: None,
            hints: ToolHints::default(),
            timeout_ms: None,
            retries: 0,
            needs_approval: false,
        };
        for (name, text, expected) in [
            ("title", "7", json!("7")),
            ("note", "7", json!("7")),
            ("note", "true", json!("true")),
            ("note", "null", json!("null")),
            ("place", "1.0", json!("1.0")),
            ("size", "2", json!("2")),
            ("size", "3", json!(3)),
            ("anything", "[]", json!("[]")),
            ("count", "7", json!(7)),
            ("count", "null", json!(null)),
            ("count", "seven", json!("seven")),
            ("level", "2", json!(2)),
            ("quick", "true", json!(true)),
            ("tags", "[\"a\"]", json!(["a"])),
            ("unknown", "7", json!(7)),
        ] {
            let given = JsonObject::from_iter([(name.to_owned(), json!(text))]);
            assert_eq!(arguments(given, &tool)[name], expected, "{name}: {text}");
        }
    }
}
