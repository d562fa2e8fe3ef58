//! Reads `tools` and `tool_choice`.

use crate::{
    ApiError,
    openai::{self, tools::Choice},
};
use serde_json::{Value, json};
use skep_engine::chat::{ToolChoice, ToolSpec};

const CHOICES: &str = "tool_choice must be \"auto\", \"none\", \"required\", {\"type\": \"function\", \"name\": …} or \
                       {\"type\": \"allowed_tools\", \"mode\": …, \"tools\": […]}";

/// The tools that a model may call, and whether it must.
#[derive(Debug)]
pub(super) struct Tools {
    pub specs: Vec<ToolSpec>,
    pub choice: ToolChoice,
    pub parallel: bool,
    /// The settings as the response shows them.
    pub shown: Vec<Value>,
    pub shown_choice: Value,
}

pub(super) fn read(
    tools: Vec<Value>,
    choice: Option<Value>,
    parallel: Option<bool>,
) -> Result<Tools, ApiError> {
    let specs = tools.iter().enumerate().map(|(index, tool)| spec(index, tool));
    let mut specs: Vec<ToolSpec> = specs.collect::<Result<_, _>>()?;
    let shown_choice = choice.unwrap_or_else(|| json!("auto"));
    let choice = match &shown_choice {
        Value::String(word) => Choice::of_word(word),
        choice => match (choice["type"].as_str(), choice["name"].as_str()) {
            (Some("function"), Some(name)) => Some(ToolChoice::Named(name.to_owned()).into()),
            (Some("allowed_tools"), _) => Choice::of_allowed(choice),
            _ => None,
        },
    };
    let choice = choice.ok_or_else(|| ApiError::parameter("tool_choice", CHOICES))?;
    choice.narrow(&mut specs);
    let choice = choice.choice;
    // If calls are forced, parallel calls are off by default, because small models repeat calls up to their token limit.
    let parallel = parallel.unwrap_or(choice == ToolChoice::Auto);
    Ok(Tools { specs, choice, parallel, shown: tools, shown_choice })
}

fn spec(index: usize, tool: &Value) -> Result<ToolSpec, ApiError> {
    let invalid =
        |field: &str, message: String| ApiError::parameter(format!("tools[{index}]{field}"), message);
    match tool["type"].as_str() {
        Some("function") => {}
        Some(kind) => {
            let message = format!(
                "the tool type {kind:?} is not supported; define a tool of type \"function\" that does it"
            );
            return Err(invalid(".type", message));
        }
        None => {
            let rule = "a tool must be {\"type\": \"function\", \"name\": …, \"parameters\": …}";
            return Err(invalid("", rule.to_owned()));
        }
    }
    let name = tool["name"].as_str().filter(|name| !name.is_empty());
    let name = name.ok_or_else(|| invalid(".name", "the tool's name is missing".to_owned()))?;
    let parameters = tool.get("parameters").filter(|parameters| !parameters.is_null());
    Ok(openai::tools::spec(name, tool["description"].as_str(), parameters))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(name: &str) -> Value {
        json!({"type": "function", "name": name, "strict": true, "parameters": {"type": "object"}})
    }

    #[test]
    fn the_choice_names_forces_or_narrows_the_tools() {
        let choose = |choice: Value| read(vec![tool("a"), tool("b")], Some(choice), None).unwrap();
        assert_eq!(choose(json!("required")).choice, ToolChoice::Required);
        assert!(!choose(json!("required")).parallel && choose(json!("auto")).parallel);
        let named = choose(json!({"type": "function", "name": "b"}));
        assert_eq!(named.choice, ToolChoice::Named("b".into()));
        let narrowed = choose(json!({"type": "allowed_tools", "mode": "required",
                                     "tools": [{"type": "function", "name": "b"}]}));
        assert_eq!(
            (narrowed.choice, narrowed.specs.len(), narrowed.shown.len()),
            (ToolChoice::Required, 1, 2)
        );
        assert_eq!(narrowed.specs[0].name, "b");
    }

    #[test]
    fn errors_name_the_invalid_field() {
        for (tools, choice, param) in [
            (json!([{"type": "web_search"}]), Value::Null, "tools[0].type"),
            (json!([{"name": "a"}]), Value::Null, "tools[0]"),
            (json!([tool("a"), {"type": "function"}]), Value::Null, "tools[1].name"),
            (json!([tool("a")]), json!("maybe"), "tool_choice"),
            (json!([tool("a")]), json!({"type": "mcp"}), "tool_choice"),
        ] {
            let choice = Some(choice).filter(|choice| !choice.is_null());
            let error = read(tools.as_array().unwrap().clone(), choice, None).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param));
        }
    }
}
