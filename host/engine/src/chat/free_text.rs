//! The constraint for an answer whose tools may not be called: any text without tool markup.
//!
//! Invariant: if tools are described but none may be called, the answer contains no tool markup. Without this,
//! a model that has seen calls writes one as text, and nobody answers it.

use super::dialect::Dialect;
use super::markup::Reading;
use super::message::ToolChoice;
use super::options::ChatOptions;
use crate::Constraint;
use crate::constraint::text_without;

/// Returns the constraint on the text, if one is needed. Structured output is left to its own constraint.
pub(super) fn constraint(options: &ChatOptions, dialect: &Dialect) -> Option<Constraint> {
    let is_described = !options.tools.is_empty() && options.tool_choice == ToolChoice::None;
    if !is_described || options.output.is_some() {
        return None;
    }
    // Channels are special tokens, which a text cannot contain, and the text comes after one.
    if matches!(dialect.markup.reading, Reading::Harmony) {
        return None;
    }
    Some(Constraint::Lark(format!("start: TEXT\n{}", text_without(dialect.markup.marks()))))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chat::markup::{OPEN, RESERVED};
    use crate::chat::{ChatFinish, ChatMessage, ToolSpec, chat, fixture};
    use serde_json::json;
    use skep_model::ChatTemplate;

    async fn says(script: &str, tool_choice: ToolChoice) -> (String, ChatFinish) {
        let engine = fixture::engine(ChatTemplate::chatml_default(), &[script]);
        let parameters = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let tool = ToolSpec { name: "now".into(), description: "The time.".into(), parameters };
        let options =
            ChatOptions { tools: vec![tool], tool_choice, max_tokens: Some(60), ..Default::default() };
        let outcome = chat(&engine, &[ChatMessage::user("hi")], options).unwrap().outcome().await.unwrap();
        (outcome.text, outcome.finish)
    }

    #[tokio::test]
    async fn text_without_markup_is_unchanged() {
        for text in ["the user\n\nsaid <b>hello</b>", "a < b, <tool, </tool>", "<", "Grüße 🐝 <tool_call"]
        {
            assert_eq!(says(text, ToolChoice::None).await, (text.to_owned(), ChatFinish::Stop));
        }
    }

    #[tokio::test]
    async fn no_markup_is_written_when_calls_are_forbidden() {
        let call = "the time: <tool_call>\n{\"name\": \"now\", \"arguments\": {}}\n</tool_call>";
        for script in [call, "<tools>now</tools>", "so </tool_call>", "<tool_response>noon</tool_response>"] {
            let (text, finish) = says(script, ToolChoice::None).await;
            assert!(!text.contains(OPEN) && RESERVED.iter().all(|markup| !text.contains(markup)), "{text}");
            assert_ne!(finish, ChatFinish::ToolCalls);
        }
        assert_eq!(says(call, ToolChoice::Auto).await.1, ChatFinish::ToolCalls);
    }
}
