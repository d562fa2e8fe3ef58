//! Tests the bounds of `/v1/responses`, and the truncation of inputs that are too long.

use super::{
    access,
    fixture::{Server, TestResponse},
    turns,
};
use crate::{AccessOptions, GatewayOptions};
use axum::{
    body::{Body, BodyDataStream},
    http::{Method, Request},
};
use futures::StreamExt;
use serde_json::{Value, json};
use skep_runtime::{ResponseOptions, Role, RuntimeOptions};
use tower::ServiceExt;

const RESPONSES: &str = "/v1/responses";

fn body(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "max_output_tokens": 4, "temperature": 0, "input": "hello"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn message(role: &str, text: String) -> Value {
    json!({"type": "message", "role": role, "content": text})
}

#[tokio::test]
async fn an_input_that_is_too_long_loses_its_oldest_items() {
    let server = Server::start().await;
    let call = json!({"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"});
    let output = json!({"type": "function_call_output", "call_id": "c1", "output": "seen ".repeat(100)});
    let mut input = vec![message("user", "the first".to_owned()), call, output];
    for index in 0..40 {
        input.push(message("assistant", format!("answer {index} {}", "and so on ".repeat(15))));
        input.push(message("user", format!("question {index}")));
    }
    let ask = |extra: Value| {
        let mut body = body(json!({"input": input, "instructions": "Only numbers."}));
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        body
    };
    let refused = server.post(RESPONSES, &ask(json!({}))).await;
    assert_eq!(refused.error()["code"], "context_length_exceeded");
    for more in [json!({}), json!({"stream": true}), json!({"background": true})] {
        let mut extra = more.clone();
        extra["truncation"] = json!("auto");
        let answer = server.ok(RESPONSES, &ask(extra)).await;
        let response = match more.get("stream") {
            Some(_) => last_response(&answer),
            None => ended(&server, answer.json()).await,
        };
        assert_eq!(response["truncation"], "auto", "{more}");
        let tokens = response["usage"]["input_tokens"].as_u64().unwrap_or_else(|| panic!("{response}"));
        assert!((3_000..4_096).contains(&tokens), "as much as fits is kept: {tokens}");
    }
    // An input that fits is not shortened.
    let short = json!({"input": [message("user", "one".to_owned()), message("user", "two".to_owned())]});
    let plain = server.ok(RESPONSES, &body(short.clone())).await.json();
    let mut auto = short;
    auto["truncation"] = json!("auto");
    let auto = server.ok(RESPONSES, &body(auto)).await.json();
    assert_eq!(auto["usage"]["input_tokens"], plain["usage"]["input_tokens"]);
    assert_eq!(plain["truncation"], "disabled");
    // The newest message has to fit.
    let long = body(json!({"truncation": "auto", "input": "too long ".repeat(1_000)}));
    assert_eq!(server.post(RESPONSES, &long).await.error()["code"], "context_length_exceeded");
}

fn last_response(answer: &TestResponse) -> Value {
    let data = answer.text.lines().rev().find_map(|line| line.strip_prefix("data: ")).unwrap();
    serde_json::from_str::<Value>(data).unwrap()["response"].take()
}

async fn ended(server: &Server, response: Value) -> Value {
    let path = format!("{RESPONSES}/{}", response["id"].as_str().unwrap());
    loop {
        let response = server.get(&path).await.json();
        if response["status"] != "queued" && response["status"] != "in_progress" {
            return response;
        }
        tokio::time::sleep(std::time::Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn references_name_at_most_64_responses() {
    let server = Server::start().await;
    let reference = |index: usize| json!({"type": "item_reference", "id": format!("msg_{index:032x}o0000")});
    let refer = async |count: usize| {
        let input: Vec<Value> = (0..count).map(reference).collect();
        server.post(RESPONSES, &body(json!({ "input": input }))).await
    };
    let allowed = refer(64).await;
    assert_eq!((allowed.status.as_u16(), &allowed.error()["code"]), (404, &json!("item_not_found")));
    let refused = refer(65).await;
    assert_eq!((refused.status.as_u16(), &refused.error()["param"]), (400, &json!("input[64].id")));
    assert!(refused.text.contains("64 responses"), "{}", refused.text);
}

#[tokio::test]
async fn a_tenant_leaves_room_for_the_responses_of_others() {
    let responses = ResponseOptions { max_stored_bytes: 40_000, ..ResponseOptions::default() };
    let runtime = RuntimeOptions { responses, ..RuntimeOptions::default() };
    let access = AccessOptions { keys_required: true, ..AccessOptions::default() };
    let options = GatewayOptions { access, ..GatewayOptions::default() };
    let server = Server::with_runtime(options, runtime).await;
    let ann = access::key(&server, "ann", Role::Invoke, None).await;
    let bob = access::key(&server, "bob", Role::Invoke, None).await;
    let create = async |key: &str| {
        let body = body(json!({"input": "word ".repeat(200)}));
        access::ask(&server, key, Method::POST, RESPONSES, body).await
    };
    let mut stored = 0;
    let full = loop {
        let answer = create(&ann).await;
        if answer.status != 200 {
            break answer;
        }
        stored += 1;
    };
    assert_eq!((full.status.as_u16(), &full.error()["code"]), (409, &json!("responses_full")));
    assert!(stored >= 10, "one tenant may take most of the room: {stored}");
    assert_eq!(create(&bob).await.status, 200, "a part is left to the other");
}

#[tokio::test]
async fn at_most_32_ignored_fields_are_named() {
    let server = Server::start().await;
    let extra: serde_json::Map<String, Value> =
        (0..50).map(|index| (format!("unknown_{index:02}"), json!(1))).collect();
    let answer = server.ok(RESPONSES, &body(Value::Object(extra))).await;
    let named: Vec<&str> = answer.headers["x-skep-ignored"].to_str().unwrap().split(", ").collect();
    assert_eq!(named.len(), 32);
    assert!(named.iter().all(|name| name.starts_with("unknown_")), "{named:?}");
}

/// Returns the next event of a stream.
async fn next(body: &mut BodyDataStream, text: &mut String) -> Value {
    while !text.contains("\n\n") {
        text.push_str(std::str::from_utf8(&body.next().await.unwrap().unwrap()).unwrap());
    }
    let (event, rest) = text.split_once("\n\n").unwrap();
    let data = event.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let event = serde_json::from_str(data).unwrap();
    *text = rest.to_owned();
    event
}

#[tokio::test(flavor = "multi_thread")]
async fn the_stream_of_an_agent_in_the_background_opens_before_its_turn() {
    let server = Server::start().await;
    turns::deploy_with_time(&server).await;
    // The session is busy with this turn until it is cancelled.
    let ask = |input: &str| json!({"model": "agent:echo", "input": input, "user": "ann", "background": true});
    let busy = server.ok(RESPONSES, &ask("~ forever")).await.json();
    let queued = server.ok(RESPONSES, &ask("hello")).await.json();
    let path = format!("{RESPONSES}/{}", queued["id"].as_str().unwrap());
    let stream = format!("{path}?stream=true");
    let request = Request::get(stream).body(Body::empty()).unwrap();
    let body = server.router.clone().oneshot(request).await.unwrap().into_body();
    let (mut body, mut text) = (body.into_data_stream(), String::new());
    for name in ["response.created", "response.queued"] {
        let event = next(&mut body, &mut text).await;
        assert_eq!(event["type"], name);
        assert_eq!(event["response"]["status"], "queued");
    }
    let busy = format!("{RESPONSES}/{}/cancel", busy["id"].as_str().unwrap());
    server.ok(&busy, &json!({})).await;
    let event = next(&mut body, &mut text).await;
    assert_eq!((&event["type"], &event["sequence_number"]), (&json!("response.in_progress"), &json!(2)));
}
