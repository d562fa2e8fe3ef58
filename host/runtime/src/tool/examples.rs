//! Examples: turns that the author of an agent wrote for its model, which sees them before a conversation's first message.
//!
//! The guest passes them in the annotation `x-examples` of the JSON Schema that they belong to: the input schema of a tool,
//! or the schema of an output. Invariant: an example that a model sees validates against that schema, and has
//! the spelling that real calls, results and answers have.

use super::{Tool, check};
use crate::Json;
use serde::{Deserialize, Serialize};
use serde_json::{Value, ser::Formatter};
use skep_engine::{
    Dialect, SchemaValidator,
    chat::{ChatMessage, ToolCall},
};
use std::{io, sync::Arc};

const ANNOTATION: &str = "x-examples";
/// Maximum number of examples of one schema.
const MAX_EXAMPLES: usize = 64;

/// The messages of one example, in order.
pub(crate) type Example = Vec<ChatMessage>;

/// An example of a tool. An example without a call shows when the tool is not called.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ToolExampleJson {
    user: String,
    #[serde(default, deserialize_with = "present")]
    call: Option<Value>,
    #[serde(default, deserialize_with = "present")]
    result: Option<Value>,
    answer: String,
}

/// An example of an output.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct OutputExampleJson {
    user: String,
    answer: Value,
}

/// Removes the examples from a schema and returns them, so that neither the model nor a validator sees the annotation.
pub(crate) fn take(schema: &mut Value) -> Option<Value> {
    schema.as_object_mut()?.shift_remove(ANNOTATION)
}

/// Returns the examples of a tool, checked against its schemas. The error names the invalid one and the reason.
pub(crate) fn tool_examples(tool: &Tool, written: Value) -> Result<Vec<Example>, String> {
    let name = &tool.definition.name;
    let examples: Vec<ToolExampleJson> = read(written)?;
    let show = |(index, ToolExampleJson { user, call, result, answer }): (usize, ToolExampleJson)| {
        let wrong = |why: &str| format!("its example {} ({user:?}): {why}", index + 1);
        let mut shown = vec![ChatMessage::user(user.clone())];
        match (call, result) {
            (Some(call), Some(result)) => {
                tool.check_arguments(&call).map_err(|why| wrong(&why))?;
                tool.check_result(&Json::from(&result)).map_err(|why| wrong(&why))?;
                let arguments = canonical_json(&in_schema_order(&call, &tool.definition.input_schema));
                let result = match &tool.definition.output_schema {
                    Some(schema) => in_schema_order(&result, schema),
                    None => result,
                };
                let id = format!("example_{}_{name}", index + 1);
                let call = ToolCall { id: id.clone(), name: name.clone(), arguments };
                shown.push(ChatMessage { tool_calls: vec![call], ..ChatMessage::assistant("") });
                let result = ChatMessage::tool(id, result.to_string());
                shown.push(ChatMessage { name: Some(name.clone()), ..result });
            }
            (None, None) => {}
            (Some(_), None) => return Err(wrong("it has a call without a `result`")),
            (None, Some(_)) => return Err(wrong("it has a result without a `call`")),
        }
        shown.push(ChatMessage::assistant(answer));
        Ok(shown)
    };
    examples.into_iter().enumerate().map(show).collect()
}

/// Returns the examples of an output, checked against its schema.
pub(crate) fn output_examples(schema: &Value, written: Value) -> Result<Vec<ChatMessage>, String> {
    let examples: Vec<OutputExampleJson> = read(written)?;
    let validator = SchemaValidator::compile(schema, Dialect::Linear)?;
    let mut shown = Vec::with_capacity(2 * examples.len());
    for (index, OutputExampleJson { user, answer }) in examples.into_iter().enumerate() {
        check(&answer, &validator)
            .map_err(|why| format!("example {} ({user:?}): its answer is not valid {why}", index + 1))?;
        shown.push(ChatMessage::user(user));
        shown.push(ChatMessage::assistant(canonical_json(&in_schema_order(&answer, schema))));
    }
    Ok(shown)
}

/// Interleaves the examples of all tools. A small model tends to repeat the last tool that it saw, so the last one should
/// not always be the same.
pub(crate) fn in_turn(tools: &[Arc<Tool>]) -> Vec<ChatMessage> {
    let rounds = tools.iter().map(|tool| tool.examples.len()).max().unwrap_or(0);
    let round = |index| tools.iter().filter_map(move |tool| tool.examples.get(index));
    (0..rounds).flat_map(round).flatten().cloned().collect()
}

fn read<T: for<'a> Deserialize<'a>>(written: Value) -> Result<Vec<T>, String> {
    let examples: Vec<T> =
        serde_json::from_value(written).map_err(|error| format!("its `{ANNOTATION}` are wrong: {error}"))?;
    match examples.len() {
        0..=MAX_EXAMPLES => Ok(examples),
        count => Err(format!("it has {count} examples; at most {MAX_EXAMPLES} are allowed")),
    }
}

/// Distinguishes a `null` from a missing field.
fn present<'a, D: serde::Deserializer<'a>>(from: D) -> Result<Option<Value>, D::Error> {
    Value::deserialize(from).map(Some)
}

/// Returns the value with the properties of its objects in the order of the schema, in which a model has to write them.
fn in_schema_order(value: &Value, schema: &Value) -> Value {
    match value {
        Value::Object(object) => {
            let none = serde_json::Map::new();
            let properties = schema.get("properties").and_then(Value::as_object).unwrap_or(&none);
            let described = properties.iter().filter_map(|(name, schema)| {
                Some((name.clone(), in_schema_order(object.get(name)?, schema)))
            });
            let others = object.iter().filter(|(name, _)| !properties.contains_key(*name));
            described.chain(others.map(|(name, value)| (name.clone(), value.clone()))).collect()
        }
        Value::Array(items) => {
            let schema = schema.get("items").unwrap_or(&Value::Null);
            items.iter().map(|item| in_schema_order(item, schema)).collect()
        }
        other => other.clone(),
    }
}

/// Writes JSON as models do, with a space after `:` and `,`.
fn canonical_json(value: &Value) -> String {
    let mut text = Vec::new();
    let mut writer = serde_json::Serializer::with_formatter(&mut text, Spaced);
    value.serialize(&mut writer).expect("a JSON value can be written to memory");
    String::from_utf8(text).expect("JSON is UTF-8")
}

struct Spaced;

impl Formatter for Spaced {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ToolDefinition, tool::Tool};
    use serde_json::json;
    use skep_outbound::ToolHints;

    fn tool(name: &str, examples: Value) -> Result<Tool, String> {
        let integer = json!({"type": "integer", "minimum": 1});
        let definition = ToolDefinition {
            name: name.to_owned(),
            description: "Rolls dice.".to_owned(),
            input_schema: json!({
                "type": "object",
                "properties": {"count": integer, "sides": integer},
                "required": ["count", "sides"],
                "x-examples": examples,
            }),
            output_schema: Some(json!({"type": "array", "items": integer})),
            hints: ToolHints::default(),
            timeout_ms: None,
            retries: 0,
            needs_approval: false,
        };
        Tool::with_examples(definition)
    }

    #[test]
    fn a_call_is_shown_in_the_order_and_the_spelling_of_real_calls() {
        let example =
            json!({"user": "2d6", "call": {"sides": 6, "count": 2}, "result": [3, 4], "answer": "7"});
        let tool = tool("roll", json!([example, {"user": "Hi", "answer": "Hello!"}])).expect("right");
        let [call, talk] = &tool.examples[..] else { panic!("two examples") };
        assert_eq!(call[1].tool_calls[0].arguments, r#"{"count": 2, "sides": 6}"#);
        assert_eq!(
            (call[2].content.as_str(), call[2].tool_call_id.clone()),
            ("[3,4]", Some(call[1].tool_calls[0].id.clone()))
        );
        assert_eq!(call[3], ChatMessage::assistant("7"));
        assert_eq!(talk[..], [ChatMessage::user("Hi"), ChatMessage::assistant("Hello!")]);
        assert!(!tool.spec().parameters.to_string().contains("x-examples"), "the declaration has none");
    }

    #[test]
    fn examples_of_tools_take_turns() {
        let two = json!([{"user": "a1", "answer": "-"}, {"user": "a2", "answer": "-"}]);
        let one = json!([{"user": "b1", "answer": "-"}]);
        let tools =
            [("a", two), ("b", one)].map(|(name, examples)| Arc::new(tool(name, examples).expect(name)));
        let said: Vec<String> = in_turn(&tools).into_iter().map(|message| message.content).collect();
        assert_eq!(said, ["a1", "-", "b1", "-", "a2", "-"]);
    }

    #[test]
    fn a_wrong_example_is_named() {
        for (example, why) in [
            (json!({"user": "x", "call": {"count": 0, "sides": 6}, "result": [], "answer": ""}), "/count"),
            (json!({"user": "x", "call": {"count": 1}, "result": [], "answer": ""}), "sides"),
            (
                json!({"user": "x", "call": {"count": 1, "sides": 6}, "result": "six", "answer": ""}),
                "result of tool",
            ),
            (json!({"user": "x", "call": {"count": 1, "sides": 6}, "answer": ""}), "without a `result`"),
            (json!({"user": "x", "result": [], "answer": ""}), "without a `call`"),
        ] {
            let why_not =
                tool("roll", json!([{"user": "Hi", "answer": "Hello!"}, example])).err().expect(why);
            assert!(why_not.contains("its example 2 (\"x\")") && why_not.contains(why), "{why_not}");
        }
        for (examples, why) in [
            (json!("x"), "are wrong"),
            (json!([{"user": "x"}]), "missing field `answer`"),
            (json!(vec![json!({"user": "x", "answer": "y"}); 65]), "at most 64"),
        ] {
            let why_not = tool("roll", examples).err().expect(why);
            assert!(why_not.contains(why), "{why_not}");
        }
    }

    #[test]
    fn answers_of_outputs_are_checked_and_spelled() {
        let schema =
            json!({"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}});
        let answer = json!({"age": 36, "name": "Ada"});
        let shown =
            output_examples(&schema, json!([{"user": "I am Ada, 36.", "answer": answer}])).expect("right");
        assert_eq!(shown[1].content, r#"{"name": "Ada", "age": 36}"#);
        let why = output_examples(&schema, json!([{"user": "x", "answer": {"age": "old"}}]))
            .expect_err("no number");
        assert!(why.contains("example 1") && why.contains("/age"), "{why}");
    }
}
