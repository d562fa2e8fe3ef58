//! Tests `/tokenize` and `/detokenize`.

use super::{access::guarded, fixture::Server};
use serde_json::{Value, json};
use skep_engine::SpecialTokens;

#[tokio::test]
async fn a_text_becomes_tokens_and_the_tokens_the_text() {
    let server = Server::start().await;
    let prompt = "the tool: é <|im_start|>";
    let answer =
        server.ok("/tokenize", &json!({"model": "tiny", "prompt": prompt, "return_token_strs": true})).await;
    let answer = answer.json();
    let ids = server.engine.tokenizer().encode(prompt, SpecialTokens::Parse).unwrap();
    assert_eq!(answer["tokens"], json!(ids));
    assert_eq!((&answer["count"], &answer["max_model_len"]), (&json!(ids.len()), &json!(4096)));
    let texts = answer["token_strs"].as_array().unwrap();
    assert_eq!((texts.len(), &texts[0]), (ids.len(), &json!("the")));
    assert_eq!(server.ok("/detokenize", &json!({"tokens": ids})).await.json(), json!({"prompt": prompt}));
    let plain = server.ok("/tokenize", &json!({"prompt": prompt, "add_special_tokens": false})).await.json();
    assert_eq!(plain["tokens"], json!(ids), "this model begins no text with a token of its own");
    assert!(plain.get("token_strs").is_none());
    assert_eq!(server.ok("/tokenize", &json!({"prompt": ""})).await.json()["count"], 0);
}

#[tokio::test]
async fn a_chat_has_the_tokens_that_its_request_counts() {
    let server = Server::start().await;
    let messages = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]);
    let tools = json!([{"type": "function", "function": {"name": "look"}}]);
    for tools in [Value::Null, tools] {
        let chat = json!({"messages": messages, "tools": tools});
        let counted = server.ok("/tokenize", &chat).await.json()["count"].as_u64().unwrap();
        let mut request = chat.clone();
        request["max_tokens"] = json!(1);
        let used = server.ok("/v1/chat/completions", &request).await.json();
        assert_eq!(used["usage"]["prompt_tokens"], counted);
        let mut closed = chat;
        closed["add_generation_prompt"] = json!(false);
        let closed = server.ok("/tokenize", &closed).await.json()["count"].as_u64().unwrap();
        assert!(closed < counted, "{closed} {counted}");
    }
}

#[tokio::test]
async fn mistakes_are_named_and_fields_without_effect_are_ignored() {
    let server = Server::start().await;
    for (path, body, param) in [
        ("/tokenize", json!({}), "prompt"),
        ("/tokenize", json!({"prompt": "a", "messages": []}), "prompt"),
        ("/tokenize", json!({"messages": []}), "messages"),
        ("/tokenize", json!({"messages": [{"role": "user"}]}), "messages[0].content"),
        ("/tokenize", json!({"prompt": 7}), "prompt"),
        ("/detokenize", json!({}), "tokens"),
        ("/detokenize", json!({"tokens": [5, 99_999]}), "tokens[1]"),
        ("/detokenize", json!({"tokens": [-1]}), "tokens[0]"),
    ] {
        let answer = server.post(path, &body).await;
        assert_eq!(
            (answer.status.as_u16(), &answer.error()["param"]),
            (400, &json!(param)),
            "{}",
            answer.text
        );
    }
    let answer = server.ok("/tokenize", &json!({"prompt": "a", "tools": [], "x": 1})).await;
    assert_eq!(answer.headers["x-skep-ignored"], "x, tools");
    let unknown = server.post("/tokenize", &json!({"model": "none", "prompt": "a"})).await;
    assert_eq!((unknown.status.as_u16(), &unknown.error()["code"]), (404, &json!("model_not_found")));
    let long = server.post("/tokenize", &json!({"prompt": "a b ".repeat(100_000)})).await;
    assert_eq!(long.error()["code"], "context_length_exceeded");
    let guarded = guarded().await;
    assert_eq!(guarded.post("/tokenize", &json!({"prompt": "a"})).await.status, 401);
}
