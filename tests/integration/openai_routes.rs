//! `/v1/chat/completions` and `/v1/completions`: shapes, streaming, batching, prefix reuse.

use crate::harness::{MODEL, client, content, parse_events, shared};
use futures::future::join_all;
use serde_json::{Value, json};

#[tokio::test]
async fn a_chat_completion_has_usage_and_the_model_name() {
    let request = json!({"model": MODEL, "temperature": 0, "max_tokens": 12,
        "messages": [{"role": "user", "content": "What is gravity?"}]});
    let answer = shared().ok("/v1/chat/completions", request).await;
    assert_eq!(answer["object"], "chat.completion");
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    assert!(content(&answer).to_lowercase().contains("gravity"), "{answer}");
    let usage = &answer["usage"];
    assert_eq!(usage["completion_tokens"], 12);
    let total = usage["prompt_tokens"].as_u64().unwrap() + 12;
    assert_eq!(usage["total_tokens"].as_u64(), Some(total));
    assert!(usage["prompt_tokens_details"]["cached_tokens"].is_u64());
}

#[tokio::test]
async fn streamed_and_unstreamed_answers_are_equal() {
    for (temperature, stop) in [(0.0, json!(null)), (0.8, json!(null)), (0.0, json!(["the", "\n"]))] {
        let request = json!({"temperature": temperature, "seed": 7, "max_tokens": 40, "stop": stop,
            "messages": [{"role": "user", "content": "Name three colours and a café ☕."}]});
        let whole = shared().ok("/v1/chat/completions", request.clone()).await;
        let chunks = stream(request).await;
        let text: String =
            chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(text, content(&whole));
        let finish = chunks.iter().find_map(|chunk| chunk["choices"][0]["finish_reason"].as_str());
        assert_eq!(finish, whole["choices"][0]["finish_reason"].as_str());
        let usage = &chunks.last().unwrap()["usage"];
        assert_eq!(usage["completion_tokens"], whole["usage"]["completion_tokens"]);
    }
}

#[tokio::test]
async fn an_answer_does_not_depend_on_other_requests_of_the_batch() {
    let request = |n: usize| {
        json!({"prompt": format!("Once upon a time, in village number {n}, there was"), "temperature": 0,
            "max_tokens": 24, "ignore_eos": true})
    };
    let mut alone = Vec::new();
    for n in 0..4 {
        alone.push(completion_text(&shared().ok("/v1/completions", request(n)).await));
    }
    let together = join_all((0..4).map(|n| shared().ok("/v1/completions", request(n)))).await;
    for (n, answer) in together.iter().enumerate() {
        assert_eq!(completion_text(answer), alone[n]);
    }
}

#[tokio::test]
async fn a_repeated_prompt_is_cached_and_has_the_same_answer() {
    let prompt = "The quick brown fox jumps over the lazy dog. ".repeat(12) + "And then";
    let request = json!({"prompt": prompt, "temperature": 0, "max_tokens": 16, "ignore_eos": true});
    let cold = shared().ok("/v1/completions", request.clone()).await;
    let warm = shared().ok("/v1/completions", request).await;
    assert_eq!(completion_text(&cold), completion_text(&warm));
    let cached = warm["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    let prompt_tokens = warm["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(cached >= 96 && cached < prompt_tokens, "{cached} of {prompt_tokens} tokens were cached");
}

#[tokio::test]
async fn prompts_can_be_text_or_ids_and_several_at_once() {
    let one = json!({"prompt": "The capital of France is", "temperature": 0, "max_tokens": 4});
    let text = completion_text(&shared().ok("/v1/completions", one).await);
    let ids = json!({"prompt": [504, 3575, 282, 4649, 314], "temperature": 0, "max_tokens": 4});
    assert_eq!(completion_text(&shared().ok("/v1/completions", ids).await), text);
    let both = json!({"prompt": [[504, 3575, 282, 4649, 314], [504, 3575, 282, 4649, 314]], "temperature": 0,
        "max_tokens": 4, "n": 2});
    let answer = shared().ok("/v1/completions", both).await;
    let choices = answer["choices"].as_array().unwrap();
    assert_eq!(choices.len(), 4);
    for (index, choice) in choices.iter().enumerate() {
        assert_eq!(choice["index"], index);
        assert_eq!(choice["text"], text);
    }
}

#[tokio::test]
async fn a_seed_repeats_a_draw_and_another_seed_changes_it() {
    let request = |seed: u64| {
        json!({"prompt": "My favourite animal is", "temperature": 1.2, "seed": seed, "max_tokens": 24,
            "ignore_eos": true})
    };
    let texts = join_all([1, 1, 2].map(|seed| shared().ok("/v1/completions", request(seed)))).await;
    let texts: Vec<String> = texts.iter().map(completion_text).collect();
    assert_eq!(texts[0], texts[1]);
    assert_ne!(texts[0], texts[2]);
}

#[tokio::test]
async fn a_disconnected_client_frees_its_slot() {
    let before = cancelled_requests().await;
    let request = json!({"prompt": "Count: 1, 2, 3,", "max_tokens": 4000, "ignore_eos": true, "stream": true,
        "temperature": 0});
    let mut response = client().post(shared().at("/v1/completions")).json(&request).send().await.unwrap();
    assert!(response.chunk().await.unwrap().is_some(), "the stream has started");
    drop(response);
    // Without cancellation, it runs to its 4,000 tokens and counts as finished.
    let deadline = std::time::Instant::now() + std::time::Duration::from_secs(60);
    while cancelled_requests().await == before {
        assert!(std::time::Instant::now() < deadline, "the request was not cancelled");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn models_health_and_metrics_answer() {
    let (status, models) = shared().get("/v1/models").await;
    assert_eq!((status, models["object"].as_str()), (200, Some("list")));
    let ids: Vec<&str> = models["data"].as_array().unwrap().iter().filter_map(|m| m["id"].as_str()).collect();
    assert!(!ids.is_empty());
    assert_eq!(shared().get("/healthz").await.0, 200);
    assert_eq!(shared().get("/readyz").await.0, 200);
    let (status, metrics) = shared().get("/metrics").await;
    assert_eq!(status, 200);
    assert!(metrics.as_str().unwrap().contains("skep_engine"), "{metrics}");
}

async fn cancelled_requests() -> f64 {
    let (_, metrics) = shared().get("/metrics").await;
    let metrics = metrics.as_str().unwrap().to_owned();
    let lines = metrics
        .lines()
        .filter(|line| line.starts_with("skep_engine_requests_total") && line.contains("cancelled"));
    lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

async fn stream(mut request: Value) -> Vec<Value> {
    request["stream"] = json!(true);
    request["stream_options"] = json!({"include_usage": true});
    let response = client().post(shared().at("/v1/chat/completions")).json(&request).send().await.unwrap();
    assert_eq!(response.status(), 200);
    let events = parse_events(&response.text().await.unwrap());
    assert_eq!(events.last().unwrap().1, "[DONE]");
    let data = events.iter().map(|(_, data)| data.as_str()).filter(|data| *data != "[DONE]");
    data.map(|data| serde_json::from_str(data).unwrap()).collect()
}

fn completion_text(answer: &Value) -> String {
    answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("no text: {answer}")).to_owned()
}
