//! Reads the tools of a request, and which of them the model may call.

use crate::ApiError;
use serde::Deserialize;
use serde_json::{Value, json};
use skep_engine::chat::{ToolChoice, ToolSpec};
use utoipa::ToSchema;

/// A tool as OpenAI's `{type, function}`, or as the bare function.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatTool)]
#[serde(
    untagged,
    expecting = "a tool must be {\"type\": \"function\", \"function\": {\"name\": …, \"description\": …, \"parameters\": …}}"
)]
pub(crate) enum ToolBody {
    Wrapped {
        /// `function`.
        #[serde(default, rename = "type")]
        kind: Option<String>,
        function: FunctionBody,
    },
    Bare(FunctionBody),
}

/// A function that the model may call.
#[derive(Debug, Deserialize, ToSchema)]
#[schema(as = ChatFunction)]
pub(crate) struct FunctionBody {
    /// `function`, in a tool that is the bare function.
    #[serde(default, rename = "type")]
    kind: Option<String>,
    name: String,
    #[serde(default)]
    description: Option<String>,
    /// JSON Schema of the arguments; without one, the function has none.
    #[serde(default)]
    parameters: Option<Value>,
}

/// Reads the tools of a request.
pub(crate) fn read(tools: &[ToolBody]) -> Result<Vec<ToolSpec>, ApiError> {
    tools.iter().enumerate().map(|(index, tool)| tool.read(index)).collect()
}

impl ToolBody {
    fn read(&self, index: usize) -> Result<ToolSpec, ApiError> {
        let (kind, function) = match self {
            ToolBody::Wrapped { kind, function } => (kind, function),
            ToolBody::Bare(function) => (&function.kind, function),
        };
        if let Some(kind) = kind.as_deref().filter(|kind| *kind != "function") {
            let message =
                format!("the tool type {kind:?} is not supported; define a tool of type \"function\"");
            return Err(ApiError::parameter(format!("tools[{index}].type"), message));
        }
        Ok(spec(&function.name, function.description.as_deref(), function.parameters.as_ref()))
    }
}

/// Returns a tool. One without a schema has no arguments.
pub(crate) fn spec(name: &str, description: Option<&str>, parameters: Option<&Value>) -> ToolSpec {
    let no_arguments = || json!({"type": "object", "properties": {}, "additionalProperties": false});
    ToolSpec {
        name: name.to_owned(),
        description: description.unwrap_or_default().to_owned(),
        parameters: parameters.cloned().unwrap_or_else(no_arguments),
    }
}

/// The tools that the model may call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Choice {
    pub choice: ToolChoice,
    /// The names of the tools that the model gets, if they are not all.
    allowed: Option<Vec<String>>,
}

impl Choice {
    /// Reads the field `tool_choice` with one of its words.
    pub(crate) fn of_word(word: &str) -> Option<Self> {
        let choice = match word {
            "auto" => ToolChoice::Auto,
            "none" => ToolChoice::None,
            "required" => ToolChoice::Required,
            _ => return None,
        };
        Some(choice.into())
    }

    /// Reads a mode and a list of tools, each with its name inside or inside its `function`.
    pub(crate) fn of_allowed(body: &Value) -> Option<Self> {
        let tools = body["tools"].as_array()?;
        let name = |tool: &Value| {
            tool["name"].as_str().or_else(|| tool["function"]["name"].as_str()).map(str::to_owned)
        };
        let allowed = tools.iter().map(name).collect::<Option<_>>()?;
        let Choice { choice, .. } = Choice::of_word(body["mode"].as_str().unwrap_or("auto"))?;
        Some(Choice { choice, allowed: Some(allowed) })
    }

    /// Removes the tools that the model does not get.
    pub(crate) fn narrow(&self, tools: &mut Vec<ToolSpec>) {
        if let Some(allowed) = &self.allowed {
            tools.retain(|tool| allowed.contains(&tool.name));
        }
    }
}

impl From<ToolChoice> for Choice {
    fn from(choice: ToolChoice) -> Self {
        Choice { choice, allowed: None }
    }
}

/// Reads which tools the model may call.
pub(crate) fn choice(choice: Option<Value>) -> Result<Choice, ApiError> {
    let Some(choice) = choice else { return Ok(ToolChoice::Auto.into()) };
    if choice["type"] == "allowed_tools" {
        let rule = "an allowed_tools choice must be {\"type\": \"allowed_tools\", \"allowed_tools\": {\"mode\": \"auto\" or \"required\", \"tools\": [{\"type\": \"function\", \"function\": {\"name\": …}}]}}";
        let allowed = Choice::of_allowed(&choice["allowed_tools"]);
        return allowed.ok_or_else(|| ApiError::parameter("tool_choice", rule));
    }
    let name = choice["function"]["name"].as_str().or_else(|| choice["name"].as_str());
    match (choice.as_str(), name) {
        (Some("auto"), _) => Ok(ToolChoice::Auto.into()),
        (Some("none"), _) => Ok(ToolChoice::None.into()),
        (Some("required" | "any"), _) => Ok(ToolChoice::Required.into()),
        (None, Some(name)) => Ok(ToolChoice::Named(name.to_owned()).into()),
        _ => Err(ApiError::parameter(
            "tool_choice",
            "tool_choice must be \"auto\", \"none\", \"required\" or {\"type\": \"function\", \"function\": {\"name\": …}}",
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tools(tools: Value) -> Result<Vec<ToolSpec>, ApiError> {
        read(&serde_json::from_value::<Vec<ToolBody>>(tools).unwrap())
    }

    #[test]
    fn a_choice_of_allowed_tools_narrows_them() {
        let allowed = json!({"mode": "required", "tools": [{"type": "function", "function": {"name": "b"}}]});
        let read = choice(Some(json!({"type": "allowed_tools", "allowed_tools": allowed}))).unwrap();
        assert_eq!(read.choice, ToolChoice::Required);
        let mut tools = tools(json!([{"name": "a"}, {"name": "b"}])).unwrap();
        read.narrow(&mut tools);
        assert_eq!(tools.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["b"]);
        for allowed in [
            json!({"mode": "auto"}),
            json!({"mode": "maybe", "tools": []}),
            json!({"tools": [{"type": "mcp"}]}),
        ] {
            let error = choice(Some(json!({"type": "allowed_tools", "allowed_tools": allowed}))).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tool_choice"));
        }
    }

    #[test]
    fn both_forms_of_functions_are_read_and_no_other_tool() {
        let function = json!({"name": "a", "parameters": {"type": "object"}});
        let read = tools(json!([{"type": "function", "function": function}, {"name": "b"}])).unwrap();
        assert_eq!(read.iter().map(|tool| tool.name.as_str()).collect::<Vec<_>>(), ["a", "b"]);
        assert_eq!(read[0].parameters, json!({"type": "object"}));
        assert_eq!(read[1].parameters["additionalProperties"], false);
        for tool in
            [json!({"type": "custom", "name": "x"}), json!({"type": "mcp", "function": {"name": "x"}})]
        {
            let error = tools(json!([{"name": "b"}, tool])).unwrap_err();
            assert_eq!(error.param.as_deref(), Some("tools[1].type"));
        }
        for tool in [json!({"type": "web_search"}), json!({"type": "custom", "custom": {"name": "x"}})] {
            let error = serde_json::from_value::<Vec<ToolBody>>(json!([tool])).unwrap_err();
            assert!(error.to_string().contains("a tool must be"), "{error}");
        }
    }
}
