//! Tests the fields of OpenAI's requests: each is enforced, ignored and named, or refused.

use super::fixture::{Server, tiny_engine};
use axum::{body::Body, http::Request};
use serde_json::{Value, json};
use skep_engine::LocalModel;
use std::collections::BTreeSet;

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

fn with(mut body: Value, more: &Value) -> Value {
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

fn chat(more: Value) -> Value {
    let body = json!({"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6, "temperature": 0,
                      "ignore_eos": true});
    with(body, &more)
}

fn text(more: Value) -> Value {
    with(json!({"prompt": "hello", "max_tokens": 6, "temperature": 0, "ignore_eos": true}), &more)
}

fn ignored(answer: &super::fixture::TestResponse) -> BTreeSet<String> {
    let names = answer.headers.get("x-skep-ignored").map(|value| value.to_str().unwrap()).unwrap_or_default();
    names.split(", ").filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

fn names(names: &[&str]) -> BTreeSet<String> {
    names.iter().map(|name| (*name).to_owned()).collect()
}

#[tokio::test]
async fn ignored_fields_are_named_in_a_header() {
    let server = Server::start().await;
    let plain = server.ok(CHAT, &chat(json!({}))).await;
    assert!(ignored(&plain).is_empty());
    let more = json!({"store": true, "metadata": {"a": "b"}, "service_tier": "priority", "safety_identifier": "x",
        "prediction": {"type": "content", "content": "x"}, "verbosity": "low", "odd": [1]});
    let all = ["metadata", "odd", "prediction", "safety_identifier", "service_tier", "store", "verbosity"];
    for stream in [false, true] {
        let answer = server.ok(CHAT, &chat(with(json!({"stream": stream}), &more))).await;
        assert_eq!(ignored(&answer), names(&all), "stream: {stream}");
        if !stream {
            assert_eq!(answer.json()["choices"], plain.json()["choices"]);
        }
        let answer = server.ok(COMPLETIONS, &text(with(json!({"stream": stream}), &more))).await;
        assert_eq!(ignored(&answer), names(&all), "stream: {stream}");
    }
    let by_default = json!({"store": false, "service_tier": "auto", "n": 1, "logprobs": false, "tools": null,
        "stream_options": null, "parallel_tool_calls": true, "user": "ada", "prompt_cache_key": "k"});
    assert!(ignored(&server.ok(CHAT, &chat(by_default)).await).is_empty());
}

#[tokio::test]
async fn unsupported_fields_that_change_the_answer_are_refused() {
    let server = Server::start().await;
    for (more, param) in [
        (json!({"audio": {"voice": "alloy", "format": "wav"}}), "audio"),
        (json!({"modalities": ["text", "audio"]}), "modalities"),
        (json!({"web_search_options": {}}), "web_search_options"),
        (json!({"moderation": {"model": "omni"}}), "moderation"),
        (json!({"functions": [{"name": "f"}]}), "functions"),
        (json!({"function_call": "auto"}), "function_call"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0]"),
        (json!({"tools": [{"type": "custom", "custom": {"name": "x"}}]}), "tools[0]"),
        (json!({"tools": [{"type": "custom", "name": "x"}]}), "tools[0].type"),
        (
            json!({"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "maybe", "tools": []}}}),
            "tool_choice",
        ),
        (json!({"messages": [{"role": "function", "name": "f", "content": "1"}]}), "messages[0].role"),
        (json!({"messages": [{"role": "assistant", "audio": {"id": "a"}}]}), "messages[0].audio"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "file", "file": {}}]}]}),
            "messages[0].content[0]",
        ),
        (json!({"response_format": {"type": "xml"}}), "response_format.type"),
        (json!({"reasoning_effort": "a lot"}), "reasoning_effort"),
        (json!({"prompt_cache_key": "k".repeat(257)}), "prompt_cache_key"),
        (json!({"logit_bias": {"5": 101}}), "logit_bias"),
        (json!({"top_logprobs": 2}), "top_logprobs"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs"),
        (json!({"min_tokens": 3}), "min_tokens"),
        (json!({"stream_options": {"include_usage": "yes"}}), "stream_options.include_usage"),
        (json!({"stream_options": {"include_obfuscation": 1}}), "stream_options.include_obfuscation"),
    ] {
        let answer = server.post(CHAT, &chat(more)).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (400, &json!(param)),
            "{}",
            answer.text
        );
    }
}

/// Returns the fields in the first column of the guide's rows that say so.
fn refused_in_guide(page: &str, section: &str, says: &str) -> BTreeSet<String> {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../guide").join(page);
    let guide = std::fs::read_to_string(path).unwrap();
    let section = guide.split("\n## ").find(|part| part.starts_with(section)).expect("the section");
    let rows = section.lines().filter_map(|line| line.strip_prefix("| `")?.split_once(" | "));
    let rows = rows.filter(|(_, meaning)| meaning.starts_with(says));
    rows.flat_map(|(fields, _)| fields.split('`').step_by(2).map(str::to_owned).collect::<Vec<_>>()).collect()
}

#[tokio::test]
async fn every_unsupported_field_is_refused_by_its_name_and_so_in_the_guide() {
    let server = Server::start().await;
    let user = json!([{"role": "user", "content": "hello"}]);
    let cases = [
        (
            CHAT,
            crate::openai::chat_request::UNSUPPORTED,
            ("api-fields.md", "Chat completions\n", "refuses"),
            json!({"messages": user, "max_tokens": 4}),
        ),
        (
            "/v1/messages",
            crate::anthropic::request::UNSUPPORTED,
            ("api-fields.md", "Messages\n", "refuses"),
            json!({"model": "tiny", "max_tokens": 4, "messages": user}),
        ),
        (
            "/v1/responses",
            crate::openai::responses::request::UNSUPPORTED,
            ("responses.md", "Fields\n", "400"),
            json!({"model": "tiny", "max_output_tokens": 4, "input": "hello"}),
        ),
    ];
    for (path, unsupported, (page, section, says), body) in cases {
        server.ok(path, &body).await;
        let listed = refused_in_guide(page, section, says);
        for (field, instead) in unsupported {
            let mut body = body.clone();
            body[*field] = json!(["x"]);
            let answer = server.post(path, &body).await;
            let message = answer.json()["error"]["message"].as_str().unwrap_or_default().to_owned();
            assert_eq!(answer.status, 400, "{path} {field}: {}", answer.text);
            assert_eq!(message, format!("{field} is not supported; {instead}"), "{path}");
            assert!(listed.contains(*field), "{page} does not say that {path} refuses {field}: {listed:?}");
        }
    }
}

#[tokio::test]
async fn biases_decide_the_tokens() {
    let server = Server::start().await;
    let ids = server.engine.tokenizer().encode("a", skep_engine::SpecialTokens::Literal).unwrap();
    let bias = json!({ ids[0].to_string(): 100 });
    let answer = server.ok(CHAT, &chat(json!({"logit_bias": bias}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "aaaaaa");
    let answer = server.ok(COMPLETIONS, &text(json!({"logit_bias": bias, "n": 2}))).await.json();
    assert_eq!(
        (&answer["choices"][0]["text"], &answer["choices"][1]["text"]),
        (&json!("aaaaaa"), &json!("aaaaaa"))
    );
    let other = server.engine.tokenizer().encode("b", skep_engine::SpecialTokens::Literal).unwrap();
    let both = json!({ ids[0].to_string(): -100, other[0].to_string(): 99 });
    let answer = server.ok(CHAT, &chat(json!({"logit_bias": both}))).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], "bbbbbb");
}

#[tokio::test]
async fn bounds_and_stream_options_are_enforced() {
    let server = Server::start().await;
    let answer = server.ok(CHAT, &chat(json!({"max_completion_tokens": 3, "max_tokens": 9}))).await.json();
    assert_eq!(answer["usage"]["completion_tokens"], 3);
    let streamed = |options: Value| chat(json!({"stream": true, "n": 2, "stream_options": options}));
    let with_usage =
        server.ok(CHAT, &streamed(json!({"include_usage": true, "include_obfuscation": false}))).await;
    assert!(ignored(&with_usage).is_empty());
    let chunks = with_usage.chunks();
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 12);
    let indexes: BTreeSet<u64> =
        chunks.iter().filter_map(|chunk| chunk["choices"][0]["index"].as_u64()).collect();
    assert_eq!(indexes, BTreeSet::from([0, 1]));
    let without = server.ok(CHAT, &streamed(json!({"continuous_usage_stats": true}))).await;
    assert_eq!(ignored(&without), names(&["stream_options.continuous_usage_stats"]));
    assert!(without.chunks().iter().all(|chunk| chunk["usage"].is_null() && chunk["obfuscation"].is_null()));
}

#[tokio::test]
async fn calls_are_parallel_only_where_that_is_allowed() {
    let server = Server::start().await;
    let tools = json!([{"type": "function", "function": {"name": "pick", "strict": true, "parameters": {"type": "object",
        "properties": {"n": {"enum": [1]}}, "required": ["n"], "additionalProperties": false}}}]);
    let calls = async |parallel: bool| {
        let more = json!({"tools": tools, "tool_choice": "required", "max_tokens": 400, "ignore_eos": false,
                          "parallel_tool_calls": parallel});
        let answer = server.ok(CHAT, &chat(more)).await.json();
        answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().len()
    };
    assert_eq!(calls(false).await, 1);
    assert!(calls(true).await >= 1);
}

#[tokio::test]
async fn an_agent_names_what_it_decides_itself() {
    let server = Server::start().await;
    let manifest = skep_runtime::Manifest::from_toml("name = \"echo\"").unwrap();
    server.host.deploy(manifest, super::turns::echo(), "tester").await.unwrap();
    let body = json!({"model": "agent:echo", "messages": [{"role": "user", "content": "hi"}], "temperature": 0.5,
        "max_tokens": 9, "store": true, "user": "ada"});
    let answer = server.ok(CHAT, &body).await;
    assert_eq!(ignored(&answer), names(&["max_tokens", "store", "temperature"]));
}

#[tokio::test]
async fn models_say_what_they_can_do() {
    let server = Server::start().await;
    let model = server.get("/v1/models/tiny").await.json();
    let details = &model["skep"];
    assert_eq!((&model["context_length"], &details["location"]), (&json!(4096), &json!("local")));
    assert_eq!(details["quantization"], "F32");
    assert_eq!(
        details["capabilities"],
        json!({"tools": true, "json_schema": true, "reasoning": false, "images": false, "embeddings": false,
               "tokens": true})
    );
    assert_eq!(server.get("/v1/models").await.json()["data"][0]["skep"]["capabilities"]["tools"], true);
    let slashed = server.get("/v1/models/vendor/some%2Fmodel").await;
    assert_eq!((slashed.status.as_u16(), &slashed.error()["code"]), (404, &json!("model_not_found")));
    assert!(slashed.error()["message"].to_string().contains("vendor/some/model"), "{}", slashed.text);
    let named = LocalModel::new("vendor/small", "cpu", |_| Ok(tiny_engine("vendor/small")));
    let _ = server.host.models().clone().with(named);
    let slashed = server.get("/v1/models/vendor/small").await.json();
    assert_eq!((&slashed["id"], &slashed["skep"]["state"]), (&json!("vendor/small"), &json!("unloaded")));
    assert!(slashed["skep"]["capabilities"].get("reasoning").is_none(), "it is not known before the load");
    let head = Request::head("/v1/models/tiny").body(Body::empty()).unwrap();
    assert_eq!(server.send(head).await.status, 200);
}
