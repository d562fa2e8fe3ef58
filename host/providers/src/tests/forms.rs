//! Answers that must have a form: nothing without it is told.

use serde_json::{Value, json};
use skep_engine::{
    Constraint, EngineError, RemoteModel as _,
    chat::{ChatEvent, ChatFinish, ChatMessage, ChatOptions, ToolSpec},
};

use super::{
    Heard, chunk, hear, model, options, said,
    server::{Reply, Server, status, stream},
    stopped,
};
use crate::UpstreamKind::{self, Anthropic, OpenAi, WorkersAi};

fn schema() -> ChatOptions {
    let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]});
    ChatOptions { output: Some(Constraint::JsonSchema(schema)), ..ChatOptions::default() }
}

fn tools() -> ChatOptions {
    let Some(Constraint::JsonSchema(parameters)) = schema().output else { unreachable!("set above") };
    let tool = ToolSpec { name: "f".into(), description: "Does it.".into(), parameters };
    ChatOptions { tools: vec![tool], ..ChatOptions::default() }
}

fn usage(answer: &[Value]) -> Reply {
    let counted = json!({"choices": [], "usage": {"prompt_tokens": 10, "completion_tokens": 5}});
    stream(&[answer, &[counted]].concat())
}

fn called(arguments: &str) -> Vec<Value> {
    let call = json!({"index": 0, "id": "c", "function": {"name": "f", "arguments": arguments}});
    vec![chunk(json!({"tool_calls": [call]}), Value::Null), chunk(json!({}), json!("tool_calls"))]
}

async fn asked(kind: UpstreamKind, server: &Server, asked: ChatOptions) -> Heard {
    hear(model(options(kind, &server.url)).ask(vec![ChatMessage::user("Count.")].into(), asked)).await
}

#[tokio::test]
async fn an_answer_without_its_form_is_asked_for_again_and_never_told() {
    let thought = chunk(json!({"reasoning_content": "hm"}), Value::Null);
    let server = Server::start(move |number, _| match number {
        0 => usage(&[thought.clone(), said("{\"n\": "), said("\"one\"}"), stopped()]),
        _ => usage(&[chunk(json!({"reasoning": "again"}), Value::Null), said("{\"n\": 1}"), stopped()]),
    })
    .await;
    let heard = asked(OpenAi, &server, schema()).await;
    let outcome = heard.outcome();
    assert_eq!((outcome.text.as_str(), outcome.reasoning.as_str()), ("{\"n\": 1}", "hm"));
    let reasoning: Vec<_> =
        heard.events.iter().filter(|event| matches!(event, ChatEvent::Reasoning { .. })).collect();
    assert_eq!(reasoning.len(), 1, "the second answer's reasoning is not told");
    let usage = outcome.usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.rolled_back_tokens), (20, 5, 5));
    let again = server.request(1).body;
    let messages = again["messages"].as_array().expect("messages");
    assert_eq!(messages[1], json!({"role": "assistant", "content": "{\"n\": \"one\"}"}));
    let complaint = messages[2]["content"].as_str().expect("text");
    assert!(complaint.contains("at \"/n\": \"one\" is not of type \"integer\""), "{complaint}");
}

#[tokio::test]
async fn the_asks_for_a_form_are_bounded() {
    let server = Server::always(|| usage(&[said("never"), stopped()])).await;
    let heard = asked(OpenAi, &server, schema()).await;
    assert_eq!((heard.text().as_str(), server.count()), ("", 3));
    let Err(EngineError::SchemaUnsatisfied { place, rolled_back, .. }) = heard.result else {
        panic!("{:?}", heard.result)
    };
    assert_eq!((place.as_str(), rolled_back), ("the answer", 15));
}

#[tokio::test]
async fn a_fault_while_an_answer_is_held_back_is_tried_again() {
    let server = Server::start(|number, _| match number {
        0 => vec![super::server::stream_head(), super::server::event(&said("{\"n\""))],
        _ => usage(&[said("{\"n\": 2}"), stopped()]),
    })
    .await;
    assert_eq!(asked(OpenAi, &server, schema()).await.outcome().text, "{\"n\": 2}");
}

#[tokio::test]
async fn invalid_arguments_are_asked_for_again_unless_text_was_told() {
    let server = Server::start(|number, _| match number {
        0 => usage(&called("{\"n\": \"x\"}")),
        _ => usage(&called("{\"n\": 3}")),
    })
    .await;
    let heard = asked(OpenAi, &server, tools()).await;
    let outcome = heard.outcome();
    assert_eq!((outcome.finish, outcome.tool_calls.len()), (ChatFinish::ToolCalls, 1));
    assert_eq!(outcome.tool_calls[0].arguments, "{\"n\": 3}");
    let started = heard.events.iter().filter(|event| matches!(event, ChatEvent::ToolCallStarted { .. }));
    assert_eq!(started.count(), 1, "the refused call was not told");
    let talks = Server::always(|| usage(&[vec![said("I will.")], called("{}")].concat())).await;
    let heard = asked(OpenAi, &talks, tools()).await;
    assert!(matches!(heard.result, Err(EngineError::SchemaUnsatisfied { .. })), "{:?}", heard.result);
    assert_eq!((heard.text().as_str(), talks.count()), ("I will.", 1));
}

#[tokio::test]
async fn an_answer_that_a_limit_cut_off_says_so() {
    let server = Server::always(|| usage(&[said("{\"n\":"), chunk(json!({}), json!("length"))])).await;
    let heard = asked(OpenAi, &server, schema()).await;
    let outcome = heard.outcome();
    assert_eq!((outcome.finish, outcome.cut_off), (ChatFinish::Length, true));
    assert_eq!(server.count(), 1);
}

#[tokio::test]
async fn anthropic_answers_through_a_tool() {
    let server = Server::always(|| {
        let input = json!({"type": "input_json_delta", "partial_json": "{\"n\": 4}"});
        let start = json!({"type": "tool_use", "id": "t", "name": "answer", "input": {}});
        stream(&[
            json!({"type": "message_start", "message": {"usage": {"input_tokens": 3, "output_tokens": 1}}}),
            json!({"type": "content_block_start", "index": 0, "content_block": start}),
            json!({"type": "content_block_delta", "index": 0, "delta": input}),
            json!({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 6}}),
            json!({"type": "message_stop"}),
        ])
    })
    .await;
    let heard = asked(Anthropic, &server, schema()).await;
    let outcome = heard.outcome();
    assert_eq!((outcome.text.as_str(), outcome.finish), ("{\"n\": 4}", ChatFinish::Stop));
    assert!(outcome.tool_calls.is_empty());
    assert_eq!((outcome.usage.prompt_tokens, outcome.usage.completion_tokens), (3, 6));
    assert_eq!(server.request(0).body["tool_choice"]["name"], "answer");
}

#[tokio::test]
async fn workers_ai_answers_in_one_document() {
    let body = json!({"success": true, "errors": [], "result": {"response": {"n": 5}}}).to_string();
    let server = Server::always(move || status(200, "content-type: application/json\r\n", &body)).await;
    let heard = asked(WorkersAi, &server, schema()).await;
    assert_eq!(heard.outcome().text, "{\"n\":5}");
    assert_eq!(server.request(0).body["stream"], false);
    assert!(server.request(0).head.starts_with("POST /v1/ai/run/m "), "{}", server.request(0).head);
}

#[tokio::test]
async fn a_grammar_is_refused_before_anything_is_sent() {
    let server = Server::always(|| usage(&[said("x"), stopped()])).await;
    let grammar = ChatOptions { output: Some(Constraint::Regex("[0-9]+".into())), ..ChatOptions::default() };
    let error = asked(OpenAi, &server, grammar).await.error();
    assert!(error.contains("cannot be held to a regular expression"), "{error}");
    assert_eq!(server.count(), 0);
}
