//! Tests `/v1/messages`.

use super::fixture::{Server, TestResponse};
use crate::{AccessOptions, GatewayOptions};
use axum::{body::Body, http::Request};
use serde_json::{Value, json};

const MESSAGES: &str = "/v1/messages";

fn hello(extra: Value) -> Value {
    let mut body = json!({"model": "tiny", "max_tokens": 8, "temperature": 0, "system": "You are here to help.",
                          "messages": [{"role": "user", "content": "hello, is it you? and the user"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!([{"name": "weather", "description": "The weather of a city.",
        "input_schema": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                         "required": ["city"], "additionalProperties": false}}])
}

/// Returns the events, after checking that each one is named after its type.
fn events(answer: &TestResponse) -> Vec<Value> {
    let field =
        |event: &str, name: &str| event.lines().find_map(|line| line.strip_prefix(name).map(str::to_owned));
    let events = answer.text.split("\n\n").filter(|event| event.contains("event: "));
    let read = |event: &str| {
        let data: Value = serde_json::from_str(&field(event, "data: ").unwrap()).unwrap();
        assert_eq!(field(event, "event: ").as_deref(), data["type"].as_str(), "{event}");
        data
    };
    events.map(read).collect()
}

/// Returns the error, after checking its shape.
fn error(answer: &TestResponse) -> Value {
    let mut body = answer.json();
    assert!(body["type"] == "error" && body["error"]["message"].is_string(), "{}", answer.text);
    assert_eq!(body["request_id"].as_str(), answer.headers["request-id"].to_str().ok());
    body["error"].take()
}

#[tokio::test]
async fn a_message_has_its_shape_and_counts_what_was_cached() {
    let server = Server::start().await;
    let first = server.ok(MESSAGES, &hello(json!({"unheard_of": 1}))).await;
    assert_eq!(first.headers["x-skep-model"], "tiny");
    assert_eq!(first.headers["x-skep-ignored"], "unheard_of");
    let first = first.json();
    assert_eq!(
        (&first["type"], &first["role"], &first["model"]),
        (&json!("message"), &json!("assistant"), &json!("tiny"))
    );
    assert_eq!((&first["stop_reason"], &first["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
    assert_eq!(first["content"][0]["type"], "text");
    assert_eq!(
        (&first["usage"]["output_tokens"], &first["usage"]["cache_read_input_tokens"]),
        (&json!(8), &json!(0))
    );
    let all = first["usage"]["input_tokens"].as_u64().unwrap();
    let second = server.ok(MESSAGES, &hello(json!({}))).await.json();
    let count = |field: &str| second["usage"][field].as_u64().unwrap();
    assert!(count("cache_read_input_tokens") >= 16);
    assert_eq!(count("input_tokens") + count("cache_read_input_tokens"), all);
    let counted = server.ok("/v1/messages/count_tokens", &hello(json!({"max_tokens": null}))).await.json();
    assert_eq!(counted, json!({"input_tokens": all}));
}

#[tokio::test]
async fn the_answers_of_both_apis_are_the_same() {
    let server = Server::start().await;
    let message = server.ok(MESSAGES, &hello(json!({"max_tokens": 20}))).await.json();
    let chat = json!({"model": "tiny", "max_tokens": 20, "temperature": 0, "messages": [
        {"role": "system", "content": "You are here to help."},
        {"role": "user", "content": "hello, is it you? and the user"}]});
    let chat = server.ok("/v1/chat/completions", &chat).await.json();
    assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
}

#[tokio::test]
async fn a_message_begins_where_the_request_ends() {
    let server = Server::start().await;
    let body = json!({"model": "tiny", "max_tokens": 20, "temperature": 0, "messages": [
        {"role": "user", "content": "hello, is it you?"}, {"role": "assistant", "content": "It is me, and"}]});
    let message = server.ok(MESSAGES, &body).await.json();
    let chat = server
        .ok("/v1/chat/completions", &{
            let mut chat = body.clone();
            chat["continue_final_message"] = json!(true);
            chat
        })
        .await
        .json();
    assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    let counted = server.ok("/v1/messages/count_tokens", &body).await.json();
    assert_eq!(counted["input_tokens"], chat["usage"]["prompt_tokens"]);
    let mut asked = body.clone();
    asked["messages"][1]["role"] = json!("user");
    let other = server.ok(MESSAGES, &asked).await.json();
    assert_ne!(other["content"], message["content"], "a message of the user is answered");
}

#[tokio::test]
async fn a_streamed_message_is_the_whole_message_in_pieces() {
    let server = Server::start().await;
    let whole = server.ok(MESSAGES, &hello(json!({}))).await.json();
    let events = events(&server.ok(MESSAGES, &hello(json!({"stream": true}))).await);
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(whole["content"][0]["text"], text);
    assert_eq!(events[0]["type"], "message_start");
    assert_eq!(events.last().unwrap()["type"], "message_stop");
    let end = &events[events.len() - 2];
    assert_eq!(
        (&end["delta"]["stop_reason"], &end["usage"]["output_tokens"]),
        (&json!("max_tokens"), &json!(8))
    );
}

#[tokio::test]
async fn a_tool_is_used_and_its_result_extends_the_cached_prefix() {
    let server = Server::start().await;
    for choice in [json!({"type": "any"}), json!({"type": "tool", "name": "weather"})] {
        let mut body = hello(json!({"tools": weather(), "tool_choice": choice, "max_tokens": 300}));
        let first = server.ok(MESSAGES, &body).await.json();
        assert_eq!(first["stop_reason"], "tool_use", "{first}");
        let call = first["content"][0].clone();
        assert_eq!((&call["type"], &call["name"]), (&json!("tool_use"), &json!("weather")));
        assert!(["Rome", "Oslo"].contains(&call["input"]["city"].as_str().unwrap()));

        body["stream"] = json!(true);
        let events = events(&server.ok(MESSAGES, &body).await);
        let input: String =
            events.iter().filter_map(|event| event["delta"]["partial_json"].as_str()).collect();
        assert_eq!(serde_json::from_str::<Value>(&input).unwrap(), call["input"]);

        let result = json!([{"type": "tool_result", "tool_use_id": call["id"], "content": "sunny"}]);
        let messages = body["messages"].as_array_mut().unwrap();
        messages.push(json!({"role": "assistant", "content": first["content"]}));
        messages.push(json!({"role": "user", "content": result}));
        body["tool_choice"] = json!({"type": "none"});
        (body["stream"], body["max_tokens"]) = (json!(false), json!(4));
        let usage = server.ok(MESSAGES, &body).await.json()["usage"].clone();
        assert!(usage["cache_read_input_tokens"].as_u64().unwrap() > 100, "{usage}");
    }
}

#[tokio::test]
async fn a_schema_constrains_the_answer_and_a_stop_sequence_is_named() {
    let server = Server::start().await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"], "additionalProperties": false});
    let format = json!({"format": {"type": "json_schema", "schema": schema}});
    let formed = server.ok(MESSAGES, &hello(json!({"output_config": format, "max_tokens": 60}))).await.json();
    let text: Value = serde_json::from_str(formed["content"][0]["text"].as_str().unwrap()).unwrap();
    assert!(text["ok"].is_boolean() && formed["stop_reason"] == "end_turn", "{formed}");

    let free = server.ok(MESSAGES, &hello(json!({"max_tokens": 30}))).await.json();
    let text = free["content"][0]["text"].as_str().unwrap().to_owned();
    let stop: String = text.chars().skip(4).take(3).collect();
    let stopped =
        server.ok(MESSAGES, &hello(json!({"max_tokens": 30, "stop_sequences": [stop]}))).await.json();
    assert_eq!((&stopped["stop_reason"], &stopped["stop_sequence"]), (&json!("stop_sequence"), &json!(stop)));
}

#[tokio::test]
async fn errors_have_the_shape_of_the_api_wherever_they_come_from() {
    let server = Server::start().await;
    for (extra, status, kind, named) in [
        (json!({"max_tokens": null}), 400, "invalid_request_error", "max_tokens"),
        (json!({"model": "gpt-9"}), 404, "not_found_error", "gpt-9"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image"}]}]}),
            400,
            "invalid_request_error",
            "image",
        ),
        (
            json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}),
            400,
            "invalid_request_error",
            "bash_20250124",
        ),
        (
            json!({"output_format": {"type": "json_schema", "schema": {"type": "x"}}}),
            400,
            "invalid_request_error",
            "type",
        ),
    ] {
        let answer = server.post(MESSAGES, &hello(extra)).await;
        let error = error(&answer);
        assert_eq!((answer.status.as_u16(), &error["type"]), (status, &json!(kind)), "{error}");
        assert!(error["message"].as_str().unwrap().contains(named), "{error}");
    }
    let broken = server.send(Request::post(MESSAGES).body(Body::from("{")).unwrap()).await;
    assert_eq!(error(&broken)["type"], "invalid_request_error");
    let options = GatewayOptions {
        access: AccessOptions { keys_required: true, ..AccessOptions::default() },
        ..GatewayOptions::default()
    };
    let closed = Server::with(options).await;
    let refused = closed.post(MESSAGES, &hello(json!({}))).await;
    assert_eq!((refused.status.as_u16(), &error(&refused)["type"]), (401, &json!("authentication_error")));
}
