//! Answers that must match a schema: nothing else is sent.

use std::sync::Arc;

use futures::StreamExt as _;
use serde_json::{Value, json};
use skep_engine::{
    Constraint, EngineError, RemoteModel as _, Unreported, UnreportedUse,
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
async fn an_invalid_answer_is_retried_and_never_sent() {
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
    assert_eq!(reasoning.len(), 1, "the second answer's reasoning is not sent");
    let usage = outcome.usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.refused_tokens), (20, 5, 5));
    let again = server.request(1).body;
    let messages = again["messages"].as_array().expect("messages");
    assert_eq!(messages[1], json!({"role": "assistant", "content": "{\"n\": \"one\"}"}));
    let complaint = messages[2]["content"].as_str().expect("text");
    assert!(complaint.contains("at \"/n\": \"one\" is not of type \"integer\""), "{complaint}");
}

#[tokio::test]
async fn the_number_of_requests_for_a_form_is_bounded() {
    let server = Server::always(|| usage(&[said("never"), stopped()])).await;
    let heard = asked(OpenAi, &server, schema()).await;
    assert_eq!((heard.text().as_str(), server.count()), ("", 3));
    let Err(EngineError::SchemaUnsatisfied { place, rolled_back, .. }) = heard.result else {
        panic!("{:?}", heard.result)
    };
    assert_eq!((place.as_str(), rolled_back), ("the answer", 15));
}

/// Asks for JSON, and returns what was heard, and what no event reported.
async fn asked_and_kept(server: &Server, asking: ChatOptions) -> (Heard, Vec<UnreportedUse>) {
    let unreported = Unreported::kept();
    let asking = ChatOptions { unreported: unreported.clone(), ..asking };
    (asked(OpenAi, server, asking).await, unreported.uses())
}

fn counts(uses: &[UnreportedUse]) -> Vec<(u32, u32, bool)> {
    uses.iter()
        .map(|used| (used.usage.prompt_tokens, used.usage.completion_tokens, used.is_estimate))
        .collect()
}

#[tokio::test]
async fn the_use_of_refused_answers_is_kept_if_no_answer_follows() {
    let server = Server::always(|| usage(&[said("never"), stopped()])).await;
    let (heard, uses) = asked_and_kept(&server, schema()).await;
    assert!(heard.events.is_empty() && heard.result.is_err(), "{:?}", heard.events);
    assert_eq!(counts(&uses), [(10, 5, false); 3]);
    assert!(uses.iter().all(|used| used.model == "there/m"), "{uses:?}");
    // The events report the prompt and the reasoning of the first answer.
    let thought = chunk(json!({"reasoning_content": "hm, so"}), Value::Null);
    let server = Server::always(move || usage(&[thought.clone(), said("never"), stopped()])).await;
    let (_, uses) = asked_and_kept(&server, schema()).await;
    assert_eq!(counts(&uses), [(0, 3, false), (10, 5, false), (10, 5, false)]);
}

#[tokio::test]
async fn an_outcome_reports_refused_answers_and_not_the_attempts_that_were_cut_off() {
    let server = Server::start(|number, _| match number {
        0 => vec![super::server::stream_head(), super::server::event(&said("{\"n\": 1, "))],
        1 => usage(&[said("{}"), stopped()]),
        _ => usage(&[said("{\"n\": 2}"), stopped()]),
    })
    .await;
    let (heard, uses) = asked_and_kept(&server, schema()).await;
    let usage = heard.outcome().usage;
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.refused_tokens), (20, 5, 5));
    let [(prompt, 3, true)] = counts(&uses)[..] else { panic!("{uses:?}") };
    assert!(prompt > 0, "{uses:?}");
}

#[tokio::test]
async fn a_caller_that_leaves_while_an_answer_is_held_back_leaves_an_estimate() {
    let server = Server::always(|| {
        let stall = super::server::Part::Stall(Arc::default());
        vec![super::server::stream_head(), super::server::event(&said("{\"n\": 1, ")), stall]
    })
    .await;
    let unreported = Unreported::kept();
    let asking = ChatOptions { unreported: unreported.clone(), ..schema() };
    let mut stream =
        model(options(OpenAi, &server.url)).ask(vec![ChatMessage::user("Count.")].into(), asking);
    while unreported.output_tokens() == 0 {
        let wait = std::time::Duration::from_millis(1);
        assert!(tokio::time::timeout(wait, stream.next()).await.is_err(), "nothing is sent before the end");
    }
    drop(stream);
    let [(prompt, 3, true)] = counts(&unreported.uses())[..] else { panic!("{unreported:?}") };
    assert!(prompt > 0);
}

#[tokio::test]
async fn parts_that_events_report_are_not_kept() {
    let server = Server::always(|| usage(&[said("Hello "), said("there"), stopped()])).await;
    let (heard, uses) = asked_and_kept(&server, ChatOptions::default()).await;
    assert_eq!((heard.outcome().usage.completion_tokens, counts(&uses)), (5, Vec::new()));
    let cut =
        Server::always(|| vec![super::server::stream_head(), super::server::event(&said("Hello there"))]);
    let (heard, uses) = asked_and_kept(&cut.await, ChatOptions::default()).await;
    assert_eq!((heard.text().as_str(), counts(&uses)), ("Hello there", Vec::new()));
    assert!(heard.result.is_err());
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
async fn invalid_arguments_are_retried_unless_text_was_sent() {
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
    assert_eq!(started.count(), 1, "the refused call was not sent");
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
async fn an_answer_says_which_stop_string_ended_it() {
    let stop = ChatOptions { stop: vec!["END".into()], ..ChatOptions::default() };
    for name in ["stop_reason", "matched_stop"] {
        let server = Server::always(move || {
            let mut last = stopped();
            last["choices"][0][name] = json!("END");
            stream(&[said("Hi"), last])
        })
        .await;
        let heard = asked(OpenAi, &server, stop.clone()).await;
        assert_eq!(heard.outcome().stopped_by.as_deref(), Some("END"), "{name}");
    }
    let server = Server::always(|| {
        let end = json!({"stop_reason": "stop_sequence", "stop_sequence": "END"});
        stream(&[
            json!({"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": "Hi"}}),
            json!({"type": "message_delta", "delta": end, "usage": {"output_tokens": 6}}),
            json!({"type": "message_stop"}),
        ])
    })
    .await;
    let heard = asked(Anthropic, &server, stop).await;
    assert_eq!((heard.text().as_str(), heard.outcome().stopped_by.as_deref()), ("Hi", Some("END")));
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
    assert!(error.contains("cannot be constrained to a regular expression"), "{error}");
    assert_eq!(server.count(), 0);
}
