//! The tools that a deployed agent offers, with their schemas compiled once.
//!
//! A schema that does not compile is an error at deployment, for the validator and for the decoder alike: nothing
//! that is described to a model goes unchecked.

use crate::{ToolDefinition, bindings::types};
use jsonschema::{PatternOptions, Validator};
use serde_json::Value;
use skep_engine::{Constraint, Engine, chat::ToolSpec};

const MAX_TOOLS: usize = 128;
const MAX_SCHEMA_BYTES: usize = 64 << 10;
const MAX_DESCRIPTION_BYTES: usize = 16 << 10;

#[derive(Default)]
pub(crate) struct Tools {
    tools: Vec<Tool>,
}

pub(crate) struct Tool {
    pub(crate) definition: ToolDefinition,
    input: Validator,
    output: Option<Validator>,
}

impl Tools {
    /// Checks what the agent said of its tools. The error names the tool.
    pub(crate) fn compile(described: Vec<types::ToolDefinition>, engine: &Engine) -> Result<Self, String> {
        if described.len() > MAX_TOOLS {
            return Err(format!("it describes {} tools; at most {MAX_TOOLS} are allowed", described.len()));
        }
        let mut tools: Vec<Tool> = Vec::with_capacity(described.len());
        for tool in described {
            let name = tool.name.clone();
            if tools.iter().any(|other| other.definition.name == name) {
                return Err(format!("it describes two tools with the name {name:?}"));
            }
            let tool = Tool::compile(tool).map_err(|why| format!("tool {name:?}: {why}"))?;
            engine
                .validate_constraint(&Constraint::JsonSchema(tool.definition.input_schema.clone()))
                .map_err(|error| format!("tool {name:?}: its input schema cannot be decoded to: {error}"))?;
            tools.push(tool);
        }
        Ok(Tools { tools })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.definition.name == name)
    }

    pub(crate) fn names(&self) -> Vec<String> {
        self.tools.iter().map(|tool| tool.definition.name.clone()).collect()
    }

    pub(crate) fn definitions(&self) -> Vec<ToolDefinition> {
        self.tools.iter().map(|tool| tool.definition.clone()).collect()
    }
}

impl Tool {
    pub(crate) fn spec(&self) -> ToolSpec {
        ToolSpec {
            name: self.definition.name.clone(),
            description: self.definition.description.clone(),
            parameters: self.definition.input_schema.clone(),
        }
    }

    /// The arguments as JSON, if they are what the tool takes.
    pub(crate) fn arguments(&self, text: &str) -> Result<Value, String> {
        validated(text, Some(&self.input))
            .map_err(|why| format!("the arguments for tool {:?} are not valid: {why}", self.definition.name))
    }

    /// The result as JSON, if it is what the tool gives.
    pub(crate) fn result(&self, text: &str) -> Result<Value, String> {
        validated(text, self.output.as_ref())
            .map_err(|why| format!("the result of tool {:?} is not valid: {why}", self.definition.name))
    }

    fn compile(tool: types::ToolDefinition) -> Result<Self, String> {
        let character = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        if tool.name.is_empty() || tool.name.len() > 64 || !tool.name.bytes().all(character) {
            return Err("a tool's name has 1 to 64 of the characters a-z, A-Z, 0-9, _ and -".into());
        }
        if tool.description.len() > MAX_DESCRIPTION_BYTES {
            let size = tool.description.len();
            return Err(format!(
                "its description has {size} bytes; at most {MAX_DESCRIPTION_BYTES} are allowed"
            ));
        }
        let (input_schema, input) = schema("input", &tool.input_schema)?;
        if !input_schema.is_object() || input_schema.get("type").is_some_and(|kind| kind != "object") {
            return Err("its input schema must describe an object: {\"type\": \"object\", …}".into());
        }
        let (output_schema, output) = match &tool.output_schema {
            Some(text) => schema("output", text).map(|(value, validator)| (Some(value), Some(validator)))?,
            None => (None, None),
        };
        let definition =
            ToolDefinition { name: tool.name, description: tool.description, input_schema, output_schema };
        Ok(Tool { definition, input, output })
    }
}

/// Patterns are matched in linear time: a schema must not be able to stop the host.
pub(crate) fn validator(schema: &Value) -> Result<Validator, String> {
    jsonschema::options()
        .with_pattern_options(PatternOptions::regex())
        .build(schema)
        .map_err(|error| format!("at {:?}: {error}", error.instance_path().to_string()))
}

fn schema(which: &str, text: &str) -> Result<(Value, Validator), String> {
    if text.len() > MAX_SCHEMA_BYTES {
        return Err(format!(
            "its {which} schema has {} bytes; at most {MAX_SCHEMA_BYTES} are allowed",
            text.len()
        ));
    }
    let value: Value =
        serde_json::from_str(text).map_err(|error| format!("its {which} schema is not JSON: {error}"))?;
    let validator = validator(&value).map_err(|why| format!("its {which} schema does not compile: {why}"))?;
    Ok((value, validator))
}

fn validated(text: &str, validator: Option<&Validator>) -> Result<Value, String> {
    let value: Value = serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))?;
    if let Some(validator) = validator {
        validator.validate(&value).map_err(|error| match error.instance_path().to_string() {
            path if path.is_empty() => error.to_string(),
            path => format!("at {path:?}: {error}"),
        })?;
    }
    Ok(value)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tool(input: &str, output: Option<&str>) -> Result<Tool, String> {
        Tool::compile(types::ToolDefinition {
            name: "find".into(),
            description: "finds".into(),
            input_schema: input.into(),
            output_schema: output.map(str::to_owned),
        })
    }

    #[test]
    fn arguments_and_results_are_validated_and_the_place_is_named() {
        let tool = tool(
            r#"{"type":"object","properties":{"id":{"type":"integer"}},"required":["id"]}"#,
            Some(r#"{"type":"string"}"#),
        )
        .expect("both compile");
        assert!(tool.arguments(r#"{"id": 1}"#).is_ok());
        let message = tool.arguments(r#"{"id": "x"}"#).expect_err("not an integer");
        assert!(message.contains("\"find\"") && message.contains("/id"), "{message}");
        assert!(tool.arguments("{").expect_err("cut off").contains("not JSON"));
        assert!(tool.result("\"tea\"").is_ok());
        assert!(tool.result("1").expect_err("not a string").contains("result of tool"));
    }

    #[test]
    fn a_schema_that_does_not_compile_is_an_error_and_fetches_nothing() {
        for (schema, why) in [
            ("{", "not JSON"),
            (r#"{"type":"strnig"}"#, "does not compile"),
            (r#"{"type":"string"}"#, "must describe an object"),
            ("true", "must describe an object"),
            (r#"{"type":"object","properties":{"a":{"$ref":"http://localhost/x"}}}"#, "does not compile"),
            (r#"{"type":"object","properties":{"a":{"pattern":"("}}}"#, "does not compile"),
        ] {
            let message = tool(schema, None).err().expect(schema);
            assert!(message.contains(why), "{schema}: {message}");
        }
    }
}
