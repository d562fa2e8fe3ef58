//! Tests `/ai/run/{model}`: shapes, streams and errors of Workers AI.

use super::fixture::{Server, TestResponse, until_idle};
use crate::GatewayOptions;
use serde_json::{Value, json};
use skep_engine::{Engine, GenerateRequest, LiveSetting, Priority, TokenStream};

const RUN: &str = "/ai/run/tiny";

fn prompt(extra: Value) -> Value {
    let mut body =
        json!({"prompt": "hello, is it you?", "max_tokens": 8, "temperature": 0, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// Returns the result of an envelope that reports success.
pub fn result(answer: &TestResponse) -> Value {
    let mut envelope = answer.json();
    assert_eq!(answer.status, 200, "{envelope}");
    assert_eq!(
        (&envelope["success"], &envelope["errors"], &envelope["messages"]),
        (&json!(true), &json!([]), &json!([]))
    );
    envelope["result"].take()
}

/// Returns the status and the single error of an envelope that reports failure.
pub fn failure(answer: &TestResponse) -> (u16, Value) {
    let mut envelope = answer.json();
    assert_eq!((&envelope["success"], &envelope["result"]), (&json!(false), &Value::Null), "{envelope}");
    assert_eq!(envelope["errors"].as_array().unwrap().len(), 1);
    (answer.status.as_u16(), envelope["errors"][0].take())
}

#[tokio::test]
async fn prompts_and_chats_are_answered_in_the_envelope() {
    let server = Server::start().await;
    let first = result(&server.ok(RUN, &prompt(json!({}))).await);
    assert!(first["response"].is_string() && first.get("choices").is_none(), "{first}");
    assert_eq!(first["usage"]["completion_tokens"], 8);
    let mut chat = prompt(json!({"messages": [{"role": "user", "content": "hello, is it you?"}]}));
    chat.as_object_mut().unwrap().remove("prompt");
    let account = "/client/v4/accounts/0123/ai/run/@cf/someone/tiny";
    for path in [RUN, "/ai/run/default", "/ai/run/@cf/meta/tiny", account] {
        assert_eq!(result(&server.ok(path, &chat).await)["response"], first["response"], "{path}");
    }
}

#[tokio::test]
async fn models_can_have_aliases() {
    let model_names =
        LiveSetting::new([("@cf/meta/llama-3.1-8b-instruct".to_owned(), "tiny".to_owned())].into());
    let server = Server::with(GatewayOptions { model_names, ..GatewayOptions::default() }).await;
    result(&server.ok("/ai/run/@cf/meta/llama-3.1-8b-instruct", &prompt(json!({}))).await);
    let (status, error) = failure(&server.post("/ai/run/@cf/meta/llama-2", &prompt(json!({}))).await);
    assert_eq!((status, &error["code"]), (400, &json!(5007)));
    let message = error["message"].as_str().unwrap();
    assert!(message.contains("@cf/meta/llama-2") && message.contains("tiny"), "{message}");
}

#[tokio::test]
async fn requests_in_openais_schema_are_answered_in_it_inside_the_envelope() {
    let server = Server::start().await;
    let body = json!({"model": "x", "messages": [{"role": "user", "content": "hello, is it you?"}],
                      "max_completion_tokens": 8, "temperature": 0, "ignore_eos": true});
    let answer = result(&server.ok(RUN, &body).await);
    assert_eq!((&answer["object"], &answer["model"]), (&json!("chat.completion"), &json!("tiny")));
    let native = result(&server.ok(RUN, &prompt(json!({}))).await);
    assert_eq!(answer["choices"][0]["message"]["content"], native["response"]);
    let mut streamed = body;
    streamed["stream"] = json!(true);
    let chunks = server.ok(RUN, &streamed).await.chunks();
    assert!(chunks.iter().all(|chunk| chunk["object"] == "chat.completion.chunk"), "{chunks:?}");
}

#[tokio::test]
async fn a_native_stream_joins_to_the_whole_answer() {
    let server = Server::start().await;
    let whole = result(&server.ok(RUN, &prompt(json!({}))).await);
    let chunks = server.ok(RUN, &prompt(json!({"stream": true}))).await.chunks();
    let said: String = chunks.iter().map(|chunk| chunk["response"].as_str().unwrap()).collect();
    assert_eq!(whole["response"], said.as_str());
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 8);
    assert!(chunks.len() > 2, "{chunks:?}");
}

#[tokio::test]
async fn json_answers_and_call_arguments_are_json_values() {
    let server = Server::start().await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                        "additionalProperties": false});
    let form = json!({"response_format": {"type": "json_schema", "json_schema": schema}, "ignore_eos": false,
                      "max_tokens": 60});
    let answer = result(&server.ok(RUN, &prompt(form.clone())).await);
    assert!(answer["response"]["ok"].is_boolean(), "{answer}");
    let mut cut = form;
    cut["max_tokens"] = json!(2);
    let (status, error) = failure(&server.post(RUN, &prompt(cut.clone())).await);
    assert_eq!((status, &error["code"]), (422, &json!(5024)), "an incomplete object is an error");
    cut["stream"] = json!(true);
    let streamed = server.ok(RUN, &prompt(cut)).await.text;
    assert!(streamed.contains("\"code\":5024") && !streamed.contains("[DONE]"), "{streamed}");

    let refused = json!({"type": "array", "items": {"enum": ["a", "b"]}, "minItems": 2, "not": {"contains": {"type": "string"}}});
    let form = json!({"response_format": {"type": "json_schema", "json_schema": refused}, "ignore_eos": false,
                      "max_tokens": 300});
    let (status, error) = failure(&server.post(RUN, &prompt(form.clone())).await);
    assert_eq!((status, &error["code"]), (422, &json!(5024)), "{error}");
    assert!(error["message"].as_str().unwrap().contains("`not`"), "{error}");

    let tools = json!([{"name": "weather", "description": "The weather.", "parameters":
        {"type": "object", "properties": {"days": {"enum": [1, 2]}}, "required": ["days"], "additionalProperties": false}}]);
    let calling =
        prompt(json!({"tools": tools, "tool_choice": "required", "ignore_eos": false, "max_tokens": 200,
               "parallel_tool_calls": null}));
    let answer = result(&server.ok(RUN, &calling).await);
    assert_eq!(answer["tool_calls"][0]["name"], "weather", "{answer}");
    assert!(answer["tool_calls"][0]["arguments"]["days"].is_u64(), "{answer}");
}

#[tokio::test]
async fn errors_have_a_number_and_name_their_field() {
    let server = Server::with(GatewayOptions { max_body_bytes: 65_536, ..GatewayOptions::default() }).await;
    let long = "x".repeat(20_000);
    for (body, status, code, pointer) in [
        (json!({}), 400, 5006, json!("prompt")),
        (json!({"messages": [{"role": "wizard", "content": "x"}]}), 400, 5006, json!("messages[0].role")),
        (prompt(json!({"temperature": "hot"})), 400, 5006, json!("temperature")),
        (prompt(json!({"options": {"rejectIfBusy": 7}})), 400, 5006, json!("options.rejectIfBusy")),
        (prompt(json!({"lora": "mine"})), 405, 5005, json!("lora")),
        (prompt(json!({"prompt": long})), 400, 5021, Value::Null),
        (prompt(json!({"prompt": "x".repeat(70_000)})), 413, 3006, Value::Null),
    ] {
        let (found, error) = failure(&server.post(RUN, &body).await);
        assert_eq!((found, &error["code"], &error["source"]["pointer"]), (status, &json!(code), &pointer));
    }
    let (status, error) = failure(&server.post("/ai/run/tiny?rejectIfBusy=maybe", &prompt(json!({}))).await);
    assert_eq!((status, &error["code"]), (400, &json!(5006)));
}

/// Starts as many sequences as the engine runs at once, so that another one has to wait. They are as long as the context allows,
/// because the engine does not wait for their readers. Earlier sequences must have been dropped, and their end is awaited first.
async fn occupy(engine: &Engine) -> Vec<TokenStream> {
    until_idle(engine).await;
    let mut streams = Vec::new();
    while engine.free_slots(Priority::Interactive) > 0 {
        let mut request = GenerateRequest::new(vec![65; 8]);
        request.ignore_eos = true;
        streams.push(engine.generate(request).unwrap());
    }
    streams
}

#[tokio::test]
async fn requests_wait_for_a_busy_model_unless_they_ask_to_be_rejected() {
    let server = Server::start().await;
    for (path, body) in [
        ("/ai/run/tiny?rejectIfBusy=true", prompt(json!({}))),
        (RUN, prompt(json!({"rejectIfBusy": true}))),
        (RUN, prompt(json!({"options": {"rejectIfBusy": true}}))),
    ] {
        // Comparing a response with the document takes long, so each request gets new sequences.
        let _streams = occupy(&server.engine).await;
        let answer = server.post(path, &body).await;
        assert!(answer.headers.contains_key("retry-after"));
        let (status, error) = failure(&answer);
        assert_eq!((status, &error["code"]), (429, &json!(3040)));
        assert_eq!(error["message"], "Capacity temporarily exceeded, please try again.");
    }
    let streams = occupy(&server.engine).await;
    let body = prompt(json!({}));
    let waiting = server.post(RUN, &body);
    let free = async {
        tokio::task::yield_now().await;
        drop(streams);
    };
    let (answer, ()) = tokio::join!(waiting, free);
    result(&answer);
}
