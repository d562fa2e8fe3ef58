//! Tests of call arguments that violate their schema where masks cannot enforce it: they are generated again
//! before any of them is reported.

use serde_json::{Value, json};
use skep_model::ChatTemplate;

use super::fixture;
use crate::chat::{ChatEvent, ChatMessage, ChatOptions, ToolCall, ToolSpec, chat, markup};

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
