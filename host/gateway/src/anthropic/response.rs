//! The whole response to a request for a message, and its events.

use super::error;
use crate::{
    ApiError,
    sse::{Message, Step, Writer},
};
use skep_api::{
    AnthropicBlock, AnthropicDelta, AnthropicEnd, AnthropicEvent, AnthropicMessage, AnthropicUsage, marker,
};
use skep_engine::{
    EngineError, Usage,
    chat::{ChatEvent, ChatFinish, ChatOutcome},
};

pub(crate) fn usage(usage: &Usage) -> AnthropicUsage {
    let Usage { prompt_tokens, cached_tokens, cache_write_tokens, .. } = *usage;
    AnthropicUsage {
        input_tokens: prompt_tokens.saturating_sub(cached_tokens).saturating_sub(cache_write_tokens).into(),
        cache_creation_input_tokens: cache_write_tokens.into(),
        cache_read_input_tokens: cached_tokens.into(),
        output_tokens: usage.completion_tokens.into(),
    }
}

/// Returns a message without content that has not ended.
fn beginning(model: &str) -> AnthropicMessage {
    AnthropicMessage {
        id: format!("msg_{}", uuid::Uuid::now_v7().simple()),
        kind: marker::Message,
        role: marker::Assistant,
        content: Vec::new(),
        model: model.to_owned(),
        stop_reason: None,
        stop_sequence: None,
        usage: AnthropicUsage::default(),
    }
}

/// Returns the whole message.
pub(crate) fn message(model: &str, outcome: ChatOutcome) -> Result<AnthropicMessage, ApiError> {
    let AnthropicEnd { stop_reason, stop_sequence } = end(&outcome);
    let usage = usage(&outcome.usage);
    let thinking = (!outcome.reasoning.is_empty())
        .then(|| AnthropicBlock::Thinking { thinking: outcome.reasoning, signature: String::new() });
    let text = (!outcome.text.is_empty()).then(|| AnthropicBlock::Text { text: outcome.text });
    let calls = outcome.tool_calls.into_iter().map(|call| {
        // The arguments of local models are objects, and those of others are checked here.
        let input = serde_json::from_str(&call.arguments).map_err(|error| {
            let message = format!("the model called {} with arguments that are not JSON: {error}", call.name);
            ApiError::new(axum::http::StatusCode::BAD_GATEWAY, "upstream_malformed", message)
        })?;
        Ok(AnthropicBlock::ToolUse { id: call.id, name: call.name, input })
    });
    let content = thinking.into_iter().chain(text).map(Ok).chain(calls).collect::<Result<_, ApiError>>()?;
    Ok(AnthropicMessage { content, stop_reason, stop_sequence, usage, ..beginning(model) })
}

fn end(outcome: &ChatOutcome) -> AnthropicEnd {
    let reason = match (outcome.finish, &outcome.stopped_by) {
        (ChatFinish::Length, _) => "max_tokens",
        (ChatFinish::ToolCalls, _) => "tool_use",
        (ChatFinish::Stop, Some(_)) => "stop_sequence",
        (ChatFinish::Stop, None) => "end_turn",
    };
    let stop_sequence = outcome.stopped_by.clone().filter(|_| reason == "stop_sequence");
    AnthropicEnd { stop_reason: Some(reason.to_owned()), stop_sequence }
}

/// Writes the events of a message: each block begins, grows and stops before the next one begins.
pub(crate) struct EventWriter {
    message: AnthropicMessage,
    /// Number of blocks that have begun.
    blocks: u32,
    open: Option<Open>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Open {
    Text,
    Thinking,
    Call,
}

impl EventWriter {
    pub(crate) fn new(model: &str) -> Self {
        EventWriter { message: beginning(model), blocks: 0, open: None }
    }

    fn start(&mut self, events: &mut Vec<AnthropicEvent>, kind: Open, content_block: AnthropicBlock) {
        self.close(events);
        events.push(AnthropicEvent::ContentBlockStart { index: self.blocks, content_block });
        self.blocks += 1;
        self.open = Some(kind);
    }

    fn close(&mut self, events: &mut Vec<AnthropicEvent>) {
        let Some(open) = self.open.take() else { return };
        if open == Open::Thinking {
            events.push(self.grown(AnthropicDelta::SignatureDelta { signature: String::new() }));
        }
        events.push(AnthropicEvent::ContentBlockStop { index: self.blocks - 1 });
    }

    fn grown(&self, delta: AnthropicDelta) -> AnthropicEvent {
        AnthropicEvent::ContentBlockDelta { index: self.blocks.saturating_sub(1), delta }
    }

    fn events(&mut self, event: ChatEvent) -> Vec<AnthropicEvent> {
        let mut events = Vec::new();
        match event {
            ChatEvent::Routed(routed) => self.message.model = routed.model,
            ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens } => {
                let counted = Usage { prompt_tokens, cached_tokens, cache_write_tokens, ..Usage::default() };
                self.message.usage = usage(&counted);
                events.push(AnthropicEvent::MessageStart { message: self.message.clone() });
                events.push(AnthropicEvent::Ping);
            }
            ChatEvent::Reasoning { delta: thinking } => {
                if self.open != Some(Open::Thinking) {
                    let block =
                        AnthropicBlock::Thinking { thinking: String::new(), signature: String::new() };
                    self.start(&mut events, Open::Thinking, block);
                }
                events.push(self.grown(AnthropicDelta::ThinkingDelta { thinking }));
            }
            ChatEvent::Text { delta: text, .. } if text.is_empty() => {}
            ChatEvent::Text { delta: text, .. } => {
                if self.open != Some(Open::Text) {
                    self.start(&mut events, Open::Text, AnthropicBlock::Text { text: String::new() });
                }
                events.push(self.grown(AnthropicDelta::TextDelta { text }));
            }
            ChatEvent::ToolCallStarted { id, name, .. } => {
                let input = serde_json::json!({});
                self.start(&mut events, Open::Call, AnthropicBlock::ToolUse { id, name, input });
            }
            ChatEvent::ToolCallArguments { delta: partial_json, .. } => {
                events.push(self.grown(AnthropicDelta::InputJsonDelta { partial_json }));
            }
            ChatEvent::ToolCallFinished { .. } => self.close(&mut events),
            ChatEvent::Finished(outcome) => {
                self.close(&mut events);
                let (delta, usage) = (end(&outcome), usage(&outcome.usage));
                events.extend([AnthropicEvent::MessageDelta { delta, usage }, AnthropicEvent::MessageStop]);
            }
        }
        events
    }
}

impl Writer for EventWriter {
    type Item = Result<ChatEvent, EngineError>;

    fn write(&mut self, event: Self::Item) -> Step {
        let sent = |event: &AnthropicEvent| Message::named(event.name(), event);
        match event {
            Ok(event) => Step::Go(self.events(event).iter().map(sent).collect()),
            Err(error) => {
                let error = error::detail(&ApiError::from(error));
                Step::Break(vec![sent(&AnthropicEvent::Error { error })])
            }
        }
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use skep_engine::chat::ToolCall;

    fn outcome() -> ChatOutcome {
        let call = |id: &str, arguments: &str| ToolCall {
            id: id.into(),
            name: "look".into(),
            arguments: arguments.into(),
        };
        let usage = Usage {
            prompt_tokens: 10,
            cached_tokens: 4,
            cache_write_tokens: 1,
            completion_tokens: 7,
            ..Usage::default()
        };
        let tool_calls = vec![call("a", "{\"x\":1}"), call("b", "{}")];
        let text = ChatOutcome::remote("Well.".into(), ChatFinish::ToolCalls);
        ChatOutcome { reasoning: "hm".into(), tool_calls, usage, ..text }
    }

    #[test]
    fn blocks_follow_each_other() {
        let mut writer = EventWriter::new("m");
        let text = |delta: &str| ChatEvent::Text { delta: delta.into(), logprobs: Vec::new() };
        let calls = outcome().tool_calls.into_iter().enumerate().flat_map(|(index, call)| {
            let (id, name, delta) = (call.id.clone(), call.name.clone(), call.arguments.clone());
            [
                ChatEvent::ToolCallStarted { index, id, name },
                ChatEvent::ToolCallArguments { index, delta },
                ChatEvent::ToolCallFinished { index, call },
            ]
        });
        let before = [
            ChatEvent::Started { prompt_tokens: 10, cached_tokens: 4, cache_write_tokens: 1 },
            ChatEvent::Reasoning { delta: "hm".into() },
            text("We"),
            text("ll."),
        ];
        let all = before.into_iter().chain(calls).chain([ChatEvent::Finished(outcome())]);
        let events: Vec<Value> = all
            .flat_map(|event| writer.events(event))
            .map(|event| serde_json::to_value(event).unwrap())
            .collect();
        let names: Vec<&str> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
        let block =
            ["content_block_start", "content_block_delta", "content_block_delta", "content_block_stop"];
        let call = ["content_block_start", "content_block_delta", "content_block_stop"];
        let expected: Vec<&str> = ["message_start", "ping"]
            .into_iter()
            .chain(block)
            .chain(block)
            .chain(call)
            .chain(call)
            .chain(["message_delta", "message_stop"])
            .collect();
        assert_eq!(names, expected);
        assert_eq!(
            events[0]["message"]["usage"],
            json!({"input_tokens": 5, "cache_creation_input_tokens": 1, "cache_read_input_tokens": 4, "output_tokens": 0})
        );
        assert_eq!(events[4]["delta"]["type"], "signature_delta");
        assert_eq!(
            events[10]["content_block"],
            json!({"type": "tool_use", "id": "a", "name": "look", "input": {}})
        );
        assert_eq!((&events[13]["index"], &events[13]["content_block"]["id"]), (&json!(3), &json!("b")));
        let end = &events[16];
        assert_eq!(
            (&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]),
            (&json!("tool_use"), &json!(7))
        );
    }

    #[test]
    fn the_whole_message_has_the_same_blocks() {
        let message = serde_json::to_value(message("m", outcome()).unwrap()).unwrap();
        let kinds: Vec<&str> = message["content"]
            .as_array()
            .unwrap()
            .iter()
            .map(|block| block["type"].as_str().unwrap())
            .collect();
        assert_eq!(kinds, ["thinking", "text", "tool_use", "tool_use"]);
        assert_eq!(message["content"][2]["input"], json!({"x": 1}));
        assert_eq!(message["usage"]["input_tokens"], 5);
        let stopped = ChatOutcome {
            stopped_by: Some("END".into()),
            ..ChatOutcome::remote("x".into(), ChatFinish::Stop)
        };
        let stopped = self::message("m", stopped).unwrap();
        assert_eq!(
            (stopped.stop_reason.as_deref(), stopped.stop_sequence.as_deref()),
            (Some("stop_sequence"), Some("END"))
        );
        let broken = ToolCall { id: "a".into(), name: "look".into(), arguments: "{".into() };
        let broken = ChatOutcome {
            tool_calls: vec![broken],
            ..ChatOutcome::remote(String::new(), ChatFinish::ToolCalls)
        };
        assert_eq!(self::message("m", broken).unwrap_err().code, "upstream_malformed");
    }
}
