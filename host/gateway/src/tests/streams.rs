//! Tests streamed chat responses, and the cancellation of one that nobody reads.

use super::fixture::Server;
use axum::{body::Body, http::Request};
use futures::StreamExt;
use serde_json::{Value, json};
use tower::ServiceExt;

const CHAT: &str = "/v1/chat/completions";

fn hello(extra: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 12, "temperature": 0,
                          "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn streamed_text_equals_the_whole_text() {
    let server = Server::start().await;
    let whole = server.ok(CHAT, &hello(json!({"n": 2, "seed": 1, "temperature": 1}))).await.json();
    let extra = json!({"n": 2, "seed": 1, "temperature": 1, "stream": true, "stream_options": {"include_usage": true}});
    let answer = server.ok(CHAT, &hello(extra)).await;
    assert_eq!(answer.headers["content-type"], "text/event-stream");
    let mut chunks = answer.chunks();
    let usage = chunks.pop().unwrap();
    assert_eq!(usage["choices"], json!([]));
    assert_eq!(usage["usage"]["completion_tokens"], 24);
    assert!(usage["usage"]["prompt_tokens_details"]["cached_tokens"].is_u64());
    for index in [0, 1] {
        let mine: Vec<&Value> = chunks
            .iter()
            .map(|chunk| &chunk["choices"][0])
            .filter(|choice| choice["index"] == index)
            .collect();
        assert_eq!(mine[0]["delta"]["role"], "assistant");
        let text: String = mine.iter().filter_map(|choice| choice["delta"]["content"].as_str()).collect();
        assert_eq!(text, whole["choices"][index]["message"]["content"].as_str().unwrap());
        assert_eq!(mine.last().unwrap()["finish_reason"], "length");
    }
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk" && chunk["id"] == chunks[0]["id"])
    );
}

#[tokio::test]
async fn streamed_tool_calls_join_to_the_whole_call() {
    let server = Server::start().await;
    let tools = json!([{"type": "function", "function": {"name": "pick", "parameters": {"type": "object",
        "properties": {"fruit": {"enum": ["apple", "pear"]}}, "required": ["fruit"], "additionalProperties": false}}}]);
    let extra = json!({"tools": tools, "tool_choice": "required", "max_tokens": 300, "ignore_eos": false,
                       "parallel_tool_calls": false});
    let whole = server.ok(CHAT, &hello(extra.clone())).await.json();
    let mut streamed = hello(extra);
    streamed["stream"] = json!(true);
    let chunks = server.ok(CHAT, &streamed).await.chunks();
    let calls: Vec<&Value> =
        chunks.iter().filter_map(|c| c["choices"][0]["delta"]["tool_calls"].get(0)).collect();
    assert!(calls.len() > 2);
    assert!(calls[0]["id"].is_string() && calls[0]["function"]["name"] == "pick" && calls[0]["index"] == 0);
    assert!(calls[1..].iter().all(|call| call["id"].is_null() && call["function"]["name"].is_null()));
    let arguments: String = calls.iter().filter_map(|call| call["function"]["arguments"].as_str()).collect();
    assert_eq!(
        arguments,
        whole["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"].as_str().unwrap()
    );
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "tool_calls");
}

#[tokio::test]
async fn a_refusal_is_a_status_even_for_a_stream() {
    let server = Server::start().await;
    let answer = server.post(CHAT, &hello(json!({"stream": true, "max_tokens": 100_000}))).await;
    assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (400, &json!("context_length_exceeded")));
}

#[tokio::test]
async fn a_client_that_disconnects_cancels_its_generation() {
    let body = hello(json!({"stream": true, "max_tokens": 3000}));
    // An engine may have produced everything before this task runs again, so one cancelled generation in several
    // attempts is proof: without cancellation there would be none.
    for _ in 0..20 {
        let server = Server::start().await;
        let request = Request::post(CHAT).body(Body::from(body.to_string())).unwrap();
        let response = server.router.clone().oneshot(request).await.unwrap();
        let mut stream = response.into_body().into_data_stream();
        stream.next().await.unwrap().unwrap();
        drop(stream);
        // The engine gets no other signal and must end the generation on its own.
        server.engine.drain(std::time::Duration::from_secs(60)).await;
        let stats = server.engine.stats();
        assert_eq!(stats.running, 0);
        if stats.generated_tokens < 3000 {
            return;
        }
    }
    panic!("no generation was cancelled");
}
