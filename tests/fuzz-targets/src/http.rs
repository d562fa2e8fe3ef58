//! Bodies and headers from clients: chats, exported sessions, and stream positions to resume from.

use crate::host::host;
use axum::{
    body::{Body, to_bytes},
    http::{HeaderValue, Request, StatusCode},
};
use std::{sync::OnceLock, time::Duration};
use tower::ServiceExt;

/// Timeout after which a request is abandoned, as clients do.
const PATIENCE: Duration = Duration::from_millis(500);
const CHAT_ROUTES: [&str; 9] = [
    "/v1/chat/completions",
    "/v1/completions",
    "/ai/run/tiny",
    "/v1/events",
    "/v1/messages",
    "/tokenize",
    "/detokenize",
    FILES,
    BATCHES,
];
const FILES: &str = "/v1/files";
const BATCHES: &str = "/v1/batches";
const FORM: &str = "multipart/form-data; boundary=cut";
const SESSION: &str = "/v1/agents/chat/sessions/s";

pub(crate) const CHAT_WORDS: &[&str] = &[
    "\"messages\":[",
    "{\"role\":\"user\",\"content\":\"hi\"}",
    "\"role\":\"assistant\"",
    "\"role\":\"tool\"",
    "\"tool_call_id\":\"x\"",
    "\"tool_calls\":[",
    "\"stream\":true",
    "\"stream_options\":{\"include_usage\":true}",
    "\"max_tokens\":",
    "\"temperature\":",
    "\"top_p\":",
    "\"top_k\":",
    "\"n\":",
    "\"seed\":",
    "\"stop\":[",
    "\"logit_bias\":{\"5\":1}",
    "\"logprobs\":true",
    "\"top_logprobs\":",
    "\"response_format\":{\"type\":\"json_object\"}",
    "\"tools\":[",
    "\"tool_choice\":\"required\"",
    "\"content\":[{\"type\":\"text\",\"text\":\"a\"}]",
    "\"prompt\":",
    "\"echo\":true",
    "\"requests\":[",
    "{",
    "}",
    "[",
    "]",
    ",",
    "null",
    "-1",
    "1e308",
    "\"topic\":\"a.b\"",
    "\"data\":",
];
pub(crate) const RESUME_WORDS: &[&str] = &[
    "0",
    "1",
    "-1",
    "+1",
    "18446744073709551615",
    "18446744073709551616",
    " ",
    "\t",
    "1.0",
    "0x1",
    "é",
    "99999999999999999999999",
];
pub(crate) const SESSION_WORDS: &[&str] = &[
    "\"format\":",
    "\"version\":1",
    "\"turns\":",
    "\"state\":{",
    "\"conversations\":[",
    "\"transcript\":",
    "\"messages\":[",
    "\"tokens\":[",
    "\"role\":\"tool\"",
    "\"summary\":",
    "\"model\":\"tiny\"",
    "\"name\":\"main\"",
    "18446744073709551615",
    "-1",
    "null",
    "[]",
    "{}",
    "\"====\"",
    "\"agent\":\"chat\"",
];

/// Sends a chat request, a form, or a file of requests. The first byte selects the route.
pub(crate) fn chat_body(input: &[u8]) {
    let Some((route, body)) = input.split_first() else { return };
    let route = CHAT_ROUTES[usize::from(*route) % CHAT_ROUTES.len()];
    if route == BATCHES {
        return batch_of(body);
    }
    let kind = if route == FILES { FORM } else { "application/json" };
    let request = Request::post(route).header("content-type", kind);
    send(request.body(Body::from(body.to_vec())).expect("the head is a constant"));
}

/// Uploads a file of requests, and creates a batch from it.
fn batch_of(file: &[u8]) {
    let head = b"--cut\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n--cut\r\n\
        content-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n";
    let form = [head, file, b"\r\n--cut--\r\n"].concat();
    let upload = Request::post(FILES).header("content-type", FORM).body(Body::from(form)).expect("constant");
    let uploaded = host().runtime.block_on(async {
        let Ok(response) = host().router.clone().oneshot(upload).await;
        to_bytes(response.into_body(), 1 << 20).await.expect("a whole body")
    });
    let uploaded: serde_json::Value = serde_json::from_slice(&uploaded).expect("an answer is JSON");
    // A file may spell the boundary, and the form is another one then.
    let Some(id) = uploaded["id"].as_str() else { return };
    let create =
        serde_json::json!({"input_file_id": id, "endpoint": CHAT_ROUTES[0], "completion_window": "24h"});
    let request = Request::post(BATCHES).header("content-type", "application/json");
    send(request.body(Body::from(create.to_string())).expect("constant"));
    send(Request::delete(format!("{FILES}/{id}")).body(Body::empty()).expect("an id is plain"));
}

/// Sends a raw `last-event-id` header to the events of a finished turn, and to the log.
pub(crate) fn resume_id(input: &[u8]) {
    let Ok(value) = HeaderValue::from_bytes(input) else { return };
    for path in [ended_turn(), "/v1/agents/chat/logs?follow=true"] {
        let request = Request::get(path).header("last-event-id", value.clone());
        send(request.body(Body::empty()).expect("the value is one of a header"));
    }
}

pub(crate) fn imported_session(input: &[u8]) {
    let request = Request::put("/v1/agents/chat/sessions/imported?replace=true");
    let request = request.header("content-type", "application/json");
    let status = send(request.body(Body::from(input.to_vec())).expect("the head is a constant"));
    if status == Some(StatusCode::CREATED) {
        // An accepted session must be usable.
        send(Request::get("/v1/agents/chat/sessions/imported").body(Body::empty()).expect("constant"));
        send(say("imported", "hello"));
    }
}

pub(crate) fn chat_seeds() -> Vec<Vec<u8>> {
    let bodies = [
        (
            0,
            r#"{"model":"tiny","messages":[{"role":"system","content":"s"},{"role":"user","content":"hello"}],"max_tokens":2,"temperature":0}"#,
        ),
        (
            0,
            r#"{"model":"default","stream":true,"messages":[{"role":"user","content":[{"type":"text","text":"hello"}]}],"max_completion_tokens":2,"seed":7,"n":2,"stop":["x"],"logprobs":true,"top_logprobs":2,"logit_bias":{"65":-100}}"#,
        ),
        (
            0,
            r#"{"messages":[{"role":"user","content":"w"},{"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":{"name":"f","arguments":"{\"a\":1}"}}]},{"role":"tool","tool_call_id":"a","content":"2"}],"tools":[{"type":"function","function":{"name":"f","parameters":{"type":"object"}}}],"tool_choice":"auto","parallel_tool_calls":false,"max_tokens":2}"#,
        ),
        (
            0,
            r#"{"messages":[{"role":"user","content":"j"}],"response_format":{"type":"json_schema","json_schema":{"name":"x","strict":true,"schema":{"type":"object","properties":{"a":{"type":"number"}},"required":["a"]}}},"max_tokens":4}"#,
        ),
        (1, r#"{"model":"tiny","prompt":"once","max_tokens":2,"echo":true,"logprobs":1}"#),
        (1, r#"{"model":"tiny","prompt":[1,2,3],"max_tokens":1,"stream":true}"#),
        (2, r#"{"prompt":"hello","max_tokens":2,"stream":false}"#),
        (2, r#"{"messages":[{"role":"user","content":"hello"}],"max_tokens":2,"lora":null}"#),
        (2, r#"{"requests":[{"prompt":"a","external_reference":"r","max_tokens":1}]}"#),
        (3, r#"{"id":"1","source":"shop","topic":"order.paid","data":{"a":[1,2]},"at_ms":5}"#),
        (
            4,
            r#"{"model":"tiny","max_tokens":2,"system":"s","messages":[{"role":"user","content":[{"type":"text","text":"a"}]}],"output_config":{"effort":"low"}}"#,
        ),
        (5, r#"{"prompt":"once","return_token_strs":true,"add_special_tokens":false}"#),
        (
            5,
            r#"{"messages":[{"role":"user","content":"a"}],"add_generation_prompt":false,"tools":[{"name":"f"}]}"#,
        ),
        (6, r#"{"tokens":[65,66]}"#),
        (
            7,
            "--cut\r\ncontent-disposition: form-data; name=\"purpose\"\r\n\r\nassistants\r\n--cut\r\ncontent-disposition: form-data; name=\"file\"; filename=\"f\"\r\n\r\n{}\r\n--cut--\r\n",
        ),
        (
            8,
            "{\"custom_id\":\"a\",\"method\":\"POST\",\"url\":\"/v1/chat/completions\",\"body\":{\"messages\":[{\"role\":\"user\",\"content\":\"a\"}],\"max_tokens\":1}}\n{\"custom_id\":\"b\"}\n",
        ),
    ];
    bodies.iter().map(|(route, body)| [&[*route], body.as_bytes()].concat()).collect()
}

pub(crate) fn resume_seeds() -> Vec<Vec<u8>> {
    ["0", "1", "2", "17", "18446744073709551615"].iter().map(|id| id.as_bytes().to_vec()).collect()
}

/// Returns an exported session with state and a conversation.
pub(crate) fn session_seeds() -> Vec<Vec<u8>> {
    ended_turn();
    let exported = host().runtime.block_on(async {
        let request = Request::get(format!("{SESSION}/export")).body(Body::empty()).expect("constant");
        let Ok(response) = host().router.clone().oneshot(request).await;
        to_bytes(response.into_body(), usize::MAX).await.expect("a whole body")
    });
    vec![exported.to_vec()]
}

/// Returns the path of the events of a finished turn.
fn ended_turn() -> &'static str {
    static PATH: OnceLock<String> = OnceLock::new();
    PATH.get_or_init(|| {
        let turn = host().runtime.block_on(async {
            let Ok(response) = host().router.clone().oneshot(say("s", "hello")).await;
            let body = to_bytes(response.into_body(), usize::MAX).await.expect("a whole body");
            let answer: serde_json::Value = serde_json::from_slice(&body).expect("an answer is JSON");
            answer["turn_id"].as_str().unwrap_or_else(|| panic!("the turn succeeds: {answer}")).to_owned()
        });
        format!("{SESSION}/turns/{turn}/events")
    })
}

fn say(session: &str, text: &str) -> Request<Body> {
    let request = Request::post(format!("/v1/agents/chat/sessions/{session}/messages"));
    let body = serde_json::json!({"text": text}).to_string();
    request.header("content-type", "application/json").body(Body::from(body)).expect("constant")
}

/// Returns the status, if a response arrived in time. Reads the response to its end or abandons it.
fn send(request: Request<Body>) -> Option<StatusCode> {
    let answered = async {
        let Ok(response) = host().router.clone().oneshot(request).await;
        let status = response.status();
        let _ = to_bytes(response.into_body(), 1 << 20).await;
        status
    };
    host().runtime.block_on(async { tokio::time::timeout(PATIENCE, answered).await.ok() })
}
