//! The tools that a deployed agent offers, with their schemas compiled once.
//!
//! A schema that does not compile, for the validator or for the decoder, is an error at deployment. Nothing that is
//! described to a model goes unchecked.

pub(crate) mod examples;

use crate::{Json, ToolDefinition, bindings::types};
use examples::Example;
use serde_json::Value;
use skep_engine::{Constraint, Dialect, Model, SchemaValidator, chat::ToolSpec};
use skep_outbound::ToolHints;
use std::{sync::Arc, time::Duration};

/// Maximum size of a call's arguments, whoever makes the call. They are parsed into values for validation.
pub(crate) const MAX_ARGUMENT_BYTES: usize = 1 << 20;
const MAX_TOOLS: usize = 128;
const MAX_SCHEMA_BYTES: usize = 64 << 10;
const MAX_DESCRIPTION_BYTES: usize = 16 << 10;
const MAX_TIMEOUT_MS: u32 = 86_400_000;
const MAX_RETRIES: u32 = 10;
/// Maximum length of the description of an error in a value.
const MAX_COMPLAINT_CHARS: usize = 1_000;

#[derive(Clone, Default)]
pub(crate) struct Tools {
    tools: Vec<Arc<Tool>>,
}

pub(crate) struct Tool {
    pub(crate) definition: ToolDefinition,
    /// The examples that a model sees when it is offered the tool.
    pub(crate) examples: Vec<Example>,
    input: SchemaValidator,
    output: Option<SchemaValidator>,
}

impl Tools {
    /// Checks the tools that an agent describes, and that its model can be held to their schemas if it is loaded. The error
    /// names the tool.
    pub(crate) fn compile(
        described: Vec<types::ToolDefinition>,
        model: Option<&Model>,
    ) -> Result<Self, String> {
        if described.len() > MAX_TOOLS {
            return Err(format!("it describes {} tools; at most {MAX_TOOLS} are allowed", described.len()));
        }
        let mut tools: Vec<Arc<Tool>> = Vec::with_capacity(described.len());
        for tool in described {
            let name = tool.name.clone();
            if tools.iter().any(|other| other.definition.name == name) {
                return Err(format!("it describes two tools with the name {name:?}"));
            }
            let tool = Tool::compile(tool).map_err(|why| format!("tool {name:?}: {why}"))?;
            if let Some(model) = model {
                tool.check_decodable(model).map_err(|why| format!("tool {name:?}: {why}"))?;
            }
            tools.push(Arc::new(tool));
        }
        Ok(Tools { tools })
    }

    pub(crate) fn get(&self, name: &str) -> Option<&Arc<Tool>> {
        self.tools.iter().find(|tool| tool.definition.name == name)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<Tool>> {
        self.tools.iter()
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

    /// Returns the arguments as compact JSON if they match the input schema.
    pub(crate) fn arguments(&self, text: &str) -> Result<Json, String> {
        let value = json(text).map_err(|why| self.bad_arguments(&why))?;
        self.check_arguments(&value).map(|()| Json::from(value))
    }

    pub(crate) fn check_arguments(&self, arguments: &Value) -> Result<(), String> {
        check(arguments, &self.input).map_err(|why| self.bad_arguments(&why))
    }

    /// Returns the result as JSON if it matches the output schema.
    pub(crate) fn result(&self, text: &str) -> Result<Json, String> {
        let result = Json::from_text(text.to_owned())
            .map_err(|error| self.bad_result(&format!("not JSON: {error}")))?;
        self.check_result(&result).map(|()| result)
    }

    pub(crate) fn check_result(&self, result: &Json) -> Result<(), String> {
        let Some(validator) = &self.output else { return Ok(()) };
        check(&result.value(), validator).map_err(|why| self.bad_result(&why))
    }

    /// Checks a turn's outcome, in which missing data counts as `null`.
    pub(crate) fn check_reply(&self, data: Option<&Json>) -> Result<(), String> {
        match (data, &self.output) {
            (Some(data), _) => self.check_result(data),
            (None, Some(validator)) => check(&Value::Null, validator).map_err(|why| self.bad_result(&why)),
            (None, None) => Ok(()),
        }
    }

    fn bad_arguments(&self, why: &str) -> String {
        format!("the arguments for tool {:?} are not valid: {why}", self.definition.name)
    }

    fn bad_result(&self, why: &str) -> String {
        format!("the result of tool {:?} is not valid: {why}", self.definition.name)
    }

    /// Checks that a model can be constrained to the input schema.
    pub(crate) fn check_decodable(&self, model: &Model) -> Result<(), String> {
        // An upstream is asked to follow the schema, and its answer is checked.
        let Some(engine) = model.engine() else { return Ok(()) };
        engine
            .validate_constraint(&Constraint::JsonSchema(self.definition.input_schema.clone()))
            .map_err(|error| format!("its input schema cannot be enforced while decoding: {error}"))
    }

    pub(crate) fn timeout(&self) -> Option<Duration> {
        self.definition.timeout_ms.map(|ms| Duration::from_millis(ms.into()))
    }

    /// Checks a definition from any source.
    pub(crate) fn new(definition: ToolDefinition) -> Result<Self, String> {
        if definition.description.len() > MAX_DESCRIPTION_BYTES {
            let size = definition.description.len();
            return Err(format!(
                "its description has {size} bytes; at most {MAX_DESCRIPTION_BYTES} are allowed"
            ));
        }
        let input_schema = &definition.input_schema;
        let input = compiled("input", input_schema)?;
        if !input_schema.is_object() || input_schema.get("type").is_some_and(|kind| kind != "object") {
            return Err("its input schema must describe an object: {\"type\": \"object\", …}".into());
        }
        let output =
            definition.output_schema.as_ref().map(|schema| compiled("output", schema)).transpose()?;
        Ok(Tool { definition, examples: Vec::new(), input, output })
    }

    /// Checks a definition like [`Tool::new`], and reads the examples in its input schema.
    pub(crate) fn with_examples(mut definition: ToolDefinition) -> Result<Self, String> {
        let written = examples::take(&mut definition.input_schema);
        let mut tool = Tool::new(definition)?;
        if let Some(written) = written {
            tool.examples = examples::tool_examples(&tool, written)?;
        }
        Ok(tool)
    }

    fn compile(tool: types::ToolDefinition) -> Result<Self, String> {
        let types::ToolDefinition { name, description, hints, timeout_ms, retries, needs_approval, .. } =
            tool;
        let character = |b: u8| b.is_ascii_alphanumeric() || b == b'_' || b == b'-';
        if name.is_empty() || name.len() > 64 || !name.bytes().all(character) {
            return Err("a tool's name has 1 to 64 of the characters a-z, A-Z, 0-9, _ and -".into());
        }
        let hints = tool_hints(hints);
        if timeout_ms.is_some_and(|ms| !(1..=MAX_TIMEOUT_MS).contains(&ms)) {
            return Err(format!("its timeout may be 1 to {MAX_TIMEOUT_MS} ms"));
        }
        if retries > MAX_RETRIES {
            return Err(format!("it asks for {retries} retries; at most {MAX_RETRIES} are allowed"));
        }
        if retries > 0 && !hints.may_repeat() {
            return Err("it asks for retries and is neither read-only nor idempotent: a retry could repeat its effects; \
                        declare it as read-only or idempotent, or remove the retries"
                .into());
        }
        Tool::with_examples(ToolDefinition {
            name,
            description,
            input_schema: parsed("input", &tool.input_schema)?,
            output_schema: tool.output_schema.as_deref().map(|text| parsed("output", text)).transpose()?,
            hints,
            timeout_ms,
            retries,
            needs_approval,
        })
    }
}

pub(crate) fn tool_hints(hints: types::ToolHints) -> ToolHints {
    let types::ToolHints { read_only, destructive, idempotent, open_world } = hints;
    ToolHints { read_only, destructive, idempotent, open_world }
}

pub(crate) fn wit_hints(hints: ToolHints) -> types::ToolHints {
    let ToolHints { read_only, destructive, idempotent, open_world } = hints;
    types::ToolHints { read_only, destructive, idempotent, open_world }
}

fn parsed(which: &str, text: &str) -> Result<Value, String> {
    if text.len() > MAX_SCHEMA_BYTES {
        return Err(format!(
            "its {which} schema has {} bytes; at most {MAX_SCHEMA_BYTES} are allowed",
            text.len()
        ));
    }
    serde_json::from_str(text).map_err(|error| format!("its {which} schema is not JSON: {error}"))
}

fn compiled(which: &str, schema: &Value) -> Result<SchemaValidator, String> {
    SchemaValidator::compile(schema, Dialect::Linear)
        .map_err(|why| format!("its {which} schema does not compile: {why}"))
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| format!("not JSON: {error}"))
}

/// Describes the first error in a value. The description is cut, because it quotes the value.
pub(crate) fn check(value: &Value, validator: &SchemaValidator) -> Result<(), String> {
    validator.check(value).map_err(|why| why.to_string().chars().take(MAX_COMPLAINT_CHARS).collect())
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
            hints: wit_hints(ToolHints::default()),
            timeout_ms: None,
            retries: 0,
            needs_approval: false,
        })
    }

    #[test]
    fn arguments_that_would_take_too_long_to_check_are_refused() {
        let part = |number: usize| format!(r##"{{"$ref":"#/$defs/{number}"}}"##);
        let both = |number: usize| format!(r#""{number}":{{"allOf":[{0},{0}]}}"#, part(number + 1));
        let parts: Vec<String> = (0..14).map(both).collect();
        let parts = parts.join(",") + r#","14":{"type":"integer"}"#;
        let items = format!(r#"{{"items":{0}}}"#, part(0));
        let schema = format!(r#"{{"type":"object","properties":{{"a":{items}}},"$defs":{{{parts}}}}}"#);
        let tool = tool(&schema, None).expect("it compiles");
        assert!(tool.arguments(r#"{"a":[1,2,3]}"#).is_ok());
        let many = serde_json::json!({"a": vec![1; 1_000]}).to_string();
        let message = tool.arguments(&many).expect_err("too many steps");
        assert!(message.contains("takes too long"), "{message}");
    }

    #[test]
    fn arguments_and_results_are_validated_and_errors_name_the_location() {
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

    #[test]
    fn only_what_may_be_called_twice_is_retried() {
        let compile = |hints: ToolHints, retries, timeout_ms| {
            Tool::compile(types::ToolDefinition {
                name: "pay".into(),
                description: "pays".into(),
                input_schema: "{\"type\":\"object\"}".into(),
                output_schema: None,
                hints: wit_hints(hints),
                timeout_ms,
                retries,
                needs_approval: false,
            })
            .map(|tool| tool.definition)
        };
        let neither = ToolHints { destructive: true, open_world: true, ..ToolHints::default() };
        let idempotent = ToolHints { idempotent: true, ..neither };
        for hints in [ToolHints { read_only: true, ..ToolHints::default() }, idempotent] {
            assert_eq!(compile(hints, 2, Some(500)).expect("may be called twice").retries, 2);
        }
        for (hints, retries, timeout_ms, why) in [
            (neither, 1, None, "neither read-only nor idempotent"),
            (idempotent, 11, None, "at most 10"),
            (neither, 0, Some(0), "1 to 86400000 ms"),
        ] {
            let message = compile(hints, retries, timeout_ms).expect_err(why);
            assert!(message.contains(why), "{message}");
        }
    }
}
