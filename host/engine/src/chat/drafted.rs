//! Tests that a stream is the same whether its tokens arrive one per step or several: its text, its tool calls
//! and their tokens.

use skep_model::ChatTemplate;

use super::fixture;
use crate::chat::{ChatEvent, ChatMessage, ChatOptions, ToolCall, ToolSpec, chat, markup};
use crate::{DraftLimits, EngineOptions, Speculation};

/// Returns the events that a caller receives, without the call ids, which are new each time, and the number of
/// accepted tokens.
async fn observed(script: &str, speculation: Speculation) -> (Vec<String>, u32) {
    let options = EngineOptions { speculation, ..EngineOptions::default() };
    let engine = fixture::engine_with(ChatTemplate::chatml_default(), &[script], options);
    let tools = vec![ToolSpec {
        name: "weather".to_string(),
        description: "Looks up the weather".to_string(),
        parameters: serde_json::json!({"type": "object", "additionalProperties": false, "required": ["city"],
            "properties": {"city": {"type": "string"}}}),
    }];
    // The user quotes the output, so that it can be drafted.
    let messages = [ChatMessage::user(format!("Say: {script}"))];
    let mut stream = chat(&engine, &messages, ChatOptions { tools, ..ChatOptions::default() }).unwrap();
    let (mut events, mut accepted) = (Vec::new(), 0);
    while let Some(event) = stream.next().await {
        events.push(match event.unwrap() {
            ChatEvent::ToolCallStarted { index, name, .. } => format!("{index} starts: {name}"),
            ChatEvent::ToolCallFinished { index, call } => {
                format!("{index} is {} {}", call.name, call.arguments)
            }
            ChatEvent::Finished(outcome) => {
                accepted = outcome.usage.accepted_tokens;
                format!("{:?} {} {:?}", outcome.finish, outcome.raw, outcome.tokens)
            }
            other => format!("{other:?}"),
        });
    }
    (events, accepted)
}

#[tokio::test]
async fn bundled_tokens_stream_like_single_ones() {
    let call =
        |arguments: &str| ToolCall { id: String::new(), name: "weather".into(), arguments: arguments.into() };
    let scripts = [
        "Déjà vu: ça va? naïve café — déjà vu: ça va? naïve café.".to_string(),
        format!("One moment.\n{}", markup::assistant("", &[call("{\"city\": \"Porto\"}")])),
        markup::assistant("", &[call("{\"city\": \"Porto\"}"), call("{\"city\": \"Porto Alegre\"}")]),
        "Almost <tool_ca a call, almost <tool_ca a call".to_string(),
    ];
    for script in &scripts {
        let (expected, _) = observed(script, Speculation::Off).await;
        let eager = Speculation::PromptLookup(DraftLimits { max_tokens: 12, adaptive: false });
        let (found, accepted) = observed(script, eager).await;
        assert_eq!(found, expected, "{script}");
        assert!(accepted > 5, "{accepted} tokens of {script:?} came in a shared step");
    }
}
