//! Tests `/v1/chat/completions`.

use super::fixture::Server;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn hello(extra: Value) -> Value {
    let mut body = json!({"model": "default", "messages": [{"role": "user", "content": "hello, is it you? and the user"}], "max_tokens": 8,
                          "temperature": 0, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn weather() -> Value {
    json!([{"type": "function", "function": {"name": "weather", "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2]}},
                       "required": ["city", "days"], "additionalProperties": false}}}])
}

#[tokio::test]
async fn an_answer_has_openais_shape_and_counts_cached_tokens() {
    let server = Server::start().await;
    let first = server.ok(CHAT, &hello(json!({}))).await;
    assert!(first.headers.contains_key("x-request-id"));
    let first = first.json();
    assert_eq!(first["object"], "chat.completion");
    assert_eq!(first["model"], "tiny");
    assert!(first["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let choice = &first["choices"][0];
    assert_eq!(choice["message"]["role"], "assistant");
    assert!(choice["message"]["content"].is_string());
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(first["usage"]["completion_tokens"], 8);
    assert_eq!(first["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let second = server.ok(CHAT, &hello(json!({}))).await.json();
    assert!(second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() >= 16, "{second}");
    assert_eq!(second["choices"], first["choices"], "a warm cache does not change the answer");
}

#[tokio::test]
async fn choices_are_bounded_seeded_and_reproducible() {
    let server = Server::start().await;
    let body = hello(json!({"n": 3, "temperature": 1.5, "seed": 7}));
    let answer = server.ok(CHAT, &body).await.json();
    let texts: Vec<&Value> =
        answer["choices"].as_array().unwrap().iter().map(|c| &c["message"]["content"]).collect();
    assert_eq!(texts.len(), 3);
    assert!(texts[0] != texts[1] || texts[1] != texts[2]);
    assert_eq!(answer["usage"]["completion_tokens"], 24);
    assert_eq!(server.ok(CHAT, &body).await.json()["choices"], answer["choices"]);
    assert_eq!(server.post(CHAT, &hello(json!({"n": 17}))).await.error()["param"], "n");
}

#[tokio::test]
async fn required_calls_have_valid_arguments_and_end_with_tool_calls() {
    let server = Server::start().await;
    for choice in [json!("required"), json!({"type": "function", "function": {"name": "weather"}})] {
        let body = hello(json!({"tools": weather(), "tool_choice": choice, "max_tokens": 300,
                                "parallel_tool_calls": false, "ignore_eos": false}));
        let answer = server.ok(CHAT, &body).await.json();
        let choice = &answer["choices"][0];
        assert_eq!(choice["finish_reason"], "tool_calls", "{answer}");
        assert_eq!(choice["message"]["content"], Value::Null);
        let call = &choice["message"]["tool_calls"][0];
        assert_eq!((&call["type"], &call["function"]["name"]), (&json!("function"), &json!("weather")));
        assert!(call["id"].as_str().unwrap().starts_with("call_"));
        let arguments: Value = serde_json::from_str(call["function"]["arguments"].as_str().unwrap()).unwrap();
        assert!(["Rome", "Oslo"].contains(&arguments["city"].as_str().unwrap()));
    }
}

#[tokio::test]
async fn calls_and_results_sent_back_extend_the_cached_prefix() {
    let server = Server::start().await;
    let mut body = hello(json!({"tools": weather(), "tool_choice": "required", "max_tokens": 300,
                                "parallel_tool_calls": false, "ignore_eos": false}));
    let first = server.ok(CHAT, &body).await.json();
    let message = first["choices"][0]["message"].clone();
    let id = message["tool_calls"][0]["id"].clone();
    let messages = body["messages"].as_array_mut().unwrap();
    messages.push(message);
    messages.push(json!({"role": "tool", "tool_call_id": id, "content": "sunny"}));
    body["tool_choice"] = json!("none");
    body["max_tokens"] = json!(4);
    let second = server.ok(CHAT, &body).await.json();
    let prompt = first["usage"]["prompt_tokens"].as_u64().unwrap();
    let cached = second["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    // The random model formats its call differently, so only the prompt is sure to be the same, in whole pages.
    assert!(cached + 16 > prompt, "the prompt is in the cache: {cached} of {prompt}");
}

/// Returns a schema whose masks always accept what the validation then rejects.
fn unsatisfiable() -> Value {
    json!({"type": "object", "required": ["word"], "additionalProperties": false, "properties": {
        "word": {"type": "string", "pattern": "^[ab]{2}$", "not": {"pattern": "a|b"}}}})
}

#[tokio::test]
async fn a_schema_that_no_output_satisfies_is_unprocessable() {
    let server = Server::start().await;
    for strict in [true, false] {
        let format = json!({"type": "json_schema", "json_schema": {"name": "x", "strict": strict, "schema": unsatisfiable()}});
        let mut body = hello(json!({"response_format": format}));
        (body["max_tokens"], body["ignore_eos"]) = (json!(300), json!(false));
        let answer = server.post(CHAT, &body).await;
        assert_eq!(answer.status, 422, "{}", answer.text);
        let error = answer.error();
        assert_eq!(error["code"], "schema_unsatisfied");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("/word") && message.contains("`not`"), "{message}");
        body["stream"] = json!(true);
        let told = server.ok(CHAT, &body).await.text;
        assert!(told.contains("schema_unsatisfied"), "{told}");
    }
}

#[tokio::test]
async fn likely_mistakes_in_a_schema_are_reported_in_a_header() {
    let server = Server::start().await;
    let schema = json!({"type": "object", "requird": ["ok"], "properties": {"ok": {"type": "boolean"}}});
    let mut body = hello(json!({"guided_json": schema, "max_tokens": 3}));
    for stream in [false, true] {
        body["stream"] = json!(stream);
        let answer = server.ok(CHAT, &body).await;
        let warnings = answer.headers["x-skep-schema-warnings"].to_str().unwrap();
        assert!(warnings.contains("requird") && warnings.contains("required"), "{warnings}");
    }
    body["guided_json"] = json!({"type": "object", "x-note": 1});
    assert!(!server.ok(CHAT, &body).await.headers.contains_key("x-skep-schema-warnings"));
}

#[tokio::test]
async fn response_formats_are_enforced() {
    let server = Server::start().await;
    let schema = json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                        "additionalProperties": false});
    let formats = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": true, "schema": schema}}}),
        // In OpenAI's API, `false` means best effort; here the schema is enforced nevertheless.
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": false, "schema": schema}}}),
        json!({"response_format": {"type": "json_schema", "json_schema": schema}}),
        json!({"guided_json": schema}),
    ];
    for format in formats {
        let mut body = hello(format);
        (body["max_tokens"], body["ignore_eos"]) = (json!(200), json!(false));
        let answer = server.ok(CHAT, &body).await.json();
        let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
        let value: Value = serde_json::from_str(text).unwrap();
        assert!(value["ok"].is_boolean() && value.as_object().unwrap().len() == 1, "{text}");
        assert_eq!(answer["choices"][0]["finish_reason"], "stop");
    }
    for (format, allowed) in [
        (json!({"response_format": {"type": "regex", "regex": "yes|no"}}), ["yes", "no"]),
        (json!({"guided_regex": "[ab]"}), ["a", "b"]),
        (json!({"guided_grammar": "start: \"up\" | \"down\""}), ["up", "down"]),
    ] {
        let mut body = hello(format);
        (body["max_tokens"], body["ignore_eos"]) = (json!(40), json!(false));
        let answer = server.ok(CHAT, &body).await.json();
        assert!(allowed.contains(&answer["choices"][0]["message"]["content"].as_str().unwrap()), "{answer}");
    }
    let body =
        hello(json!({"guided_json": {"type": "object", "properties": {"n": {"enum": ["abcdefghijklmnop"]}},
                                            "required": ["n"]}, "max_tokens": 3}));
    assert_eq!(server.ok(CHAT, &body).await.json()["choices"][0]["finish_reason"], "length");
}

#[tokio::test]
async fn an_incomplete_object_is_never_reported_as_complete() {
    let server = Server::start().await;
    let form = json!({"guided_json": {"const": {"key": "value"}}, "max_tokens": 40, "ignore_eos": false});
    for cut in [json!({"stop": "val"}), json!({"max_tokens": 3}), json!({"stop": ["}"], "stream": true})] {
        for (path, prompt) in [
            (CHAT, json!({"messages": [{"role": "user", "content": "x"}]})),
            ("/v1/completions", json!({"prompt": "x"})),
        ] {
            let mut body = form.clone();
            body.as_object_mut().unwrap().extend(cut.as_object().unwrap().clone());
            body.as_object_mut().unwrap().extend(prompt.as_object().unwrap().clone());
            let answer = server.ok(path, &body).await;
            let chunks = if body["stream"] == true { answer.chunks() } else { vec![answer.json()] };
            let finish = &chunks.last().unwrap()["choices"][0]["finish_reason"];
            assert_eq!(finish, "length", "{path} {cut}: {}", answer.text);
        }
    }
}

#[tokio::test]
async fn an_invalid_schema_is_an_error_that_names_the_keyword() {
    let server = Server::start().await;
    let schema = json!({"type": "array", "uniqueItems": "yes"});
    for (field, form) in [
        ("guided_json", json!({"items": schema})),
        ("response_format", json!({"type": "json_schema", "json_schema": {"schema": {"items": schema}}})),
    ] {
        for (path, prompt) in [(CHAT, "messages"), ("/v1/completions", "prompt")] {
            let mut body = hello(json!({field: form}));
            if prompt == "prompt" {
                body.as_object_mut().unwrap().remove("messages");
                body[prompt] = json!("x");
            }
            let error = server.post(path, &body).await.error();
            assert_eq!(
                (&error["code"], &error["param"]),
                (&json!("schema_invalid"), &json!(field)),
                "{path}"
            );
            assert!(
                error["message"].as_str().unwrap().contains("`uniqueItems` at `/items/uniqueItems`"),
                "{error}"
            );
        }
    }
    let mut tools = weather();
    tools[0]["function"]["parameters"]["properties"]["x"] = schema;
    let error = server.post(CHAT, &hello(json!({"tools": tools}))).await.error();
    assert!(error["message"].as_str().unwrap().contains("weather"), "{error}");
    assert!(error["message"].as_str().unwrap().contains("`/properties/x/uniqueItems`"), "{error}");
    assert_eq!(error["param"], "tools[0].parameters");
    assert_eq!(
        server.post(CHAT, &hello(json!({"guided_regex": "("}))).await.error()["code"],
        "schema_invalid"
    );
}

#[tokio::test]
async fn log_probabilities_belong_to_the_tokens_of_the_text() {
    let server = Server::start().await;
    let answer = server.ok(CHAT, &hello(json!({"logprobs": true, "top_logprobs": 3}))).await.json();
    let entries = answer["choices"][0]["logprobs"]["content"].as_array().unwrap();
    assert_eq!(entries.len(), 8);
    let mut bytes: Vec<u8> = Vec::new();
    for entry in entries {
        assert_eq!(entry["top_logprobs"].as_array().unwrap().len(), 3);
        let best = entry["top_logprobs"][0]["logprob"].as_f64().unwrap();
        assert!(best >= entry["logprob"].as_f64().unwrap(), "{entry}");
        bytes.extend(entry["bytes"].as_array().unwrap().iter().map(|byte| byte.as_u64().unwrap() as u8));
    }
    let text = answer["choices"][0]["message"]["content"].as_str().unwrap();
    assert_eq!(String::from_utf8_lossy(&bytes), text);
}

#[tokio::test]
async fn unknown_models_are_404() {
    let server = Server::start().await;
    for (model, names) in [("gpt-9", "tiny"), ("agent:nobody", "nobody")] {
        let answer = server.post(CHAT, &hello(json!({"model": model}))).await;
        assert_eq!((answer.status.as_u16(), &answer.error()["code"]), (404, &json!("model_not_found")));
        assert!(answer.text.contains(names), "{}", answer.text);
    }
    let mut body = hello(json!({"user": "u", "store": true, "metadata": {"a": "b"}, "x_vendor": 1}));
    body.as_object_mut().unwrap().remove("model");
    server.ok(CHAT, &body).await;
    server.ok(CHAT, &hello(json!({"model": "tiny"}))).await;
}
