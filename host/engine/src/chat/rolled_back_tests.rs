//! Tests of call arguments that violate their schema where masks cannot enforce it: they are generated again
//! before any of them is reported.

use serde_json::{Value, json};
use skep_model::{ChatTemplate, SpecialTokens};

use super::fixture;
use super::markup::Markup;
use crate::chat::{ChatEvent, ChatMessage, ChatOptions, ChatOutcome, ToolCall, ToolSpec, chat, markup};
use crate::{EngineError, EngineOptions};

#[tokio::test]
async fn arguments_are_checked_before_a_client_sees_them() {
    let parameters = json!({"type": "object", "required": ["tags"], "additionalProperties": false, "properties": {
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 2, "uniqueItems": true}}});
    let tools =
        vec![ToolSpec { name: "paint".into(), description: "Paints".into(), parameters: parameters.clone() }];
    let call = |arguments: &str| {
        let call = ToolCall { id: String::new(), name: "paint".into(), arguments: arguments.into() };
        markup::assistant("", &[call])
    };
    for (arguments, is_wrong) in
        [(r#"{"tags": ["red", "blue"]}"#, false), (r#"{"tags": ["red", "red"]}"#, true)]
    {
        let script = format!("One moment.\n{}", call(arguments));
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[&script]);
        let options = ChatOptions { tools: tools.clone(), max_tokens: Some(400), ..ChatOptions::default() };
        let mut stream = chat(&engine, &[ChatMessage::user("hi")], options).unwrap();
        let (mut reported, mut outcome) = (String::new(), None);
        while let Some(event) = stream.next().await {
            match event.unwrap() {
                ChatEvent::ToolCallArguments { delta, .. } => reported += &delta,
                ChatEvent::Finished(finished) => outcome = Some(finished),
                _ => {}
            }
        }
        let outcome = outcome.unwrap();
        assert_eq!(outcome.tool_calls.len(), 1, "{}", outcome.raw);
        let found: Value = serde_json::from_str(&outcome.tool_calls[0].arguments).unwrap();
        assert!(jsonschema::validator_for(&parameters).unwrap().is_valid(&found), "{found}");
        let reported: Value = serde_json::from_str(&reported).unwrap();
        assert_eq!(reported, found, "the reported arguments are those of the outcome");
        assert_eq!(outcome.usage.rolled_back_tokens > 0, is_wrong, "{:?}", outcome.usage);
    }
}

/// The markups that write arguments one by one, each with whether its tags are special tokens.
const WRITTEN: [(&str, bool); 7] = [
    ("qwen3-coder", false),
    ("qwen3-coder", true),
    ("glm-4.5", false),
    ("glm-4.5", true),
    ("glm-4.7", true),
    ("deepseek-v3.2", false),
    ("deepseek-v4", true),
];
const TAGS: [&str; 7] =
    ["<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "｜DSML｜"];

/// Lets a model of a markup call the tool `paint` with these arguments.
async fn painted(
    (markup, has_tokens): (&str, bool),
    parameters: &Value,
    arguments: &Value,
) -> Result<ChatOutcome, EngineError> {
    let markup = Markup::named(markup).unwrap();
    let call =
        ToolCall { id: String::new(), name: "paint".into(), arguments: skep_model::spelled_json(arguments) };
    let script = format!("One moment.\n{}", markup.assistant("", &[call]));
    let (tokenizer, special) = match has_tokens {
        true => (fixture::tokenizer_with(&TAGS), SpecialTokens::Parse),
        false => (fixture::tokenizer(), SpecialTokens::Literal),
    };
    let options = EngineOptions { markup: Some(markup.name), ..EngineOptions::default() };
    let engine = fixture::engine_of(tokenizer, special, ChatTemplate::chatml_default(), &[&script], options);
    let parameters = parameters.clone();
    let tools = vec![ToolSpec { name: "paint".into(), description: "Paints.".into(), parameters }];
    let options = ChatOptions { tools, max_tokens: Some(900), ..ChatOptions::default() };
    chat(&engine, &[ChatMessage::user("?")], options).unwrap().outcome().await
}

#[tokio::test]
async fn arguments_that_are_written_one_by_one_are_generated_again() {
    let colors = json!({"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 2, "uniqueItems": true});
    let value = json!({"type": "object", "required": ["name", "tags"], "additionalProperties": false, "properties": {
        "name": {"type": "string", "maxLength": 8, "not": {"enum": ["wall", "walls"]}}, "tags": colors, "size": {"type": "integer"}}});
    // These bind the arguments together.
    let together = json!({"type": "object", "additionalProperties": false, "minProperties": 2, "properties": {
        "a": {"type": "boolean"}, "b": {"type": "boolean"}, "c": {"type": "boolean"}}});
    for (parameters, arguments, is_wrong) in [
        (&value, json!({"name": "door", "tags": ["red", "blue"], "size": 3}), false),
        (&value, json!({"name": "door", "tags": ["red", "red"]}), true),
        (&value, json!({"name": "wall", "tags": ["blue", "red"], "size": 3}), true),
        (&together, json!({"a": true, "c": false}), false),
        (&together, json!({"b": true}), true),
    ] {
        for markup in WRITTEN {
            let outcome = painted(markup, parameters, &arguments).await;
            let outcome = outcome.unwrap_or_else(|error| panic!("{markup:?}, {arguments}: {error}"));
            assert_eq!(outcome.tool_calls.len(), 1, "{markup:?}, {arguments}: {}", outcome.raw);
            let found: Value = serde_json::from_str(&outcome.tool_calls[0].arguments).unwrap();
            assert!(jsonschema::validator_for(parameters).unwrap().is_valid(&found), "{markup:?}: {found}");
            assert_eq!(found == arguments, !is_wrong, "{markup:?}: {found}");
            assert_eq!(outcome.usage.rolled_back_tokens > 0, is_wrong, "{markup:?}: {:?}", outcome.usage);
            assert_eq!(outcome.text.trim(), "One moment.");
        }
    }
}

#[tokio::test]
async fn arguments_that_are_never_right_end_the_answer() {
    let parameters = json!({"type": "object", "required": ["a"], "additionalProperties": false,
                            "properties": {"a": {"enum": [1, 2], "not": {"type": "integer"}}}});
    for markup in WRITTEN {
        let Err(error) = painted(markup, &parameters, &json!({"a": 1})).await else {
            panic!("{markup:?} found a value");
        };
        assert_eq!(error.code(), "schema_unsatisfied", "{markup:?}: {error}");
        let message = error.to_string();
        assert!(
            message.contains("`not`") && message.contains("`/a` of the arguments of `paint`"),
            "{message}"
        );
    }
}
