//! Tests `/v1/completions`.

use super::fixture::Server;
use serde_json::{Value, json};

const COMPLETIONS: &str = "/v1/completions";

fn body(prompt: Value, extra: Value) -> Value {
    let mut body = json!({"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": true});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn prompts_may_be_texts_or_token_ids() {
    let server = Server::start().await;
    let ids = server.engine.tokenizer().encode("the tool", skep_engine::SpecialTokens::Parse).unwrap();
    let text_of = |answer: &Value, index: usize| answer["choices"][index]["text"].clone();
    let one = server.ok(COMPLETIONS, &body(json!("the tool"), json!({}))).await.json();
    assert_eq!(one["object"], "text_completion");
    assert_eq!(one["usage"]["prompt_tokens"], ids.len());
    let mut prompts = vec![json!(ids), json!(["the tool", "other"]), json!([ids, [5, 6]])];
    for prompt in prompts.drain(..) {
        let answer = server.ok(COMPLETIONS, &body(prompt, json!({}))).await.json();
        assert_eq!(text_of(&answer, 0), text_of(&one, 0));
    }
    let answer = server.ok(COMPLETIONS, &body(json!(["a", "b"]), json!({"n": 2}))).await.json();
    let indexes: Vec<u64> =
        answer["choices"].as_array().unwrap().iter().map(|c| c["index"].as_u64().unwrap()).collect();
    assert_eq!(indexes, [0, 1, 2, 3]);
    assert_eq!(text_of(&answer, 0), text_of(&answer, 1), "greedy choices are equal");
}

#[tokio::test]
async fn echo_scores_the_prompt() {
    let server = Server::start().await;
    let extra = json!({"echo": true, "logprobs": 2});
    let answer = server.ok(COMPLETIONS, &body(json!("the user"), extra.clone())).await.json();
    let choice = &answer["choices"][0];
    assert!(choice["text"].as_str().unwrap().starts_with("the user"));
    let logprobs = &choice["logprobs"];
    let prompt = answer["usage"]["prompt_tokens"].as_u64().unwrap() as usize;
    for key in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
        assert_eq!(logprobs[key].as_array().unwrap().len(), prompt + 4, "{key}");
    }
    assert_eq!(logprobs["token_logprobs"][0], Value::Null);
    assert!(logprobs["token_logprobs"][1].as_f64().unwrap() < 0.0);
    assert_eq!(logprobs["tokens"][0], "the");
    assert_eq!(logprobs["text_offset"][1], 3);
    let mut only_scored = body(json!("the user"), extra);
    only_scored["max_tokens"] = json!(0);
    let scored = server.ok(COMPLETIONS, &only_scored).await.json();
    assert_eq!(scored["choices"][0]["text"], "the user");
    assert_eq!(scored["choices"][0]["logprobs"]["tokens"].as_array().unwrap().len(), prompt);
}

#[tokio::test]
async fn stops_and_streams_agree_with_the_whole_response() {
    let server = Server::start().await;
    let whole = server.ok(COMPLETIONS, &body(json!("once"), json!({"max_tokens": 24}))).await.json();
    let text = whole["choices"][0]["text"].as_str().unwrap().to_owned();
    let streamed = body(
        json!("once"),
        json!({"max_tokens": 24, "stream": true, "stream_options": {"include_usage": true}}),
    );
    let chunks = server.ok(COMPLETIONS, &streamed).await.chunks();
    let joined: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["text"].as_str()).collect();
    assert_eq!(joined, text);
    assert_eq!(chunks.last().unwrap()["usage"]["completion_tokens"], 24);
    let finish: Vec<&Value> =
        chunks.iter().map(|c| &c["choices"][0]["finish_reason"]).filter(|f| !f.is_null()).collect();
    assert_eq!(finish, ["length"]);
    let stop: String = text.chars().skip(6).take(2).collect();
    let stopped =
        server.ok(COMPLETIONS, &body(json!("once"), json!({"max_tokens": 24, "stop": stop}))).await.json();
    assert_eq!(stopped["choices"][0]["text"], text.split(&stop).next().unwrap());
    assert_eq!(stopped["choices"][0]["finish_reason"], "stop");
}

#[tokio::test]
async fn invalid_parameters_are_refused() {
    let server = Server::start().await;
    for (request, param) in [
        (body(json!(""), json!({})), "prompt"),
        (body(json!([]), json!({})), "prompt"),
        (body(json!([99_999]), json!({})), "prompt"),
        (body(json!({"a": 1}), json!({})), "prompt"),
        (json!({"max_tokens": 1}), "prompt"),
        (body(json!("a"), json!({"best_of": 3})), "best_of"),
        (body(json!("a"), json!({"suffix": "b"})), "suffix"),
        (body(json!("a"), json!({"logprobs": 99})), "logprobs"),
        (body(json!("a"), json!({"stop": [""]})), "stop"),
        (body(json!("a"), json!({"stop": vec!["x"; 17]})), "stop"),
        (body(json!("a"), json!({"logit_bias": {"99999": 1}})), "logit_bias"),
    ] {
        let answer = server.post(COMPLETIONS, &request).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (400, &json!(param)),
            "{}",
            answer.text
        );
    }
    let long = body(json!("a"), json!({"max_tokens": 100_000}));
    assert_eq!(server.post(COMPLETIONS, &long).await.error()["code"], "context_length_exceeded");
}
