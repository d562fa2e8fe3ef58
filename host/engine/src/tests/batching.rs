//! Tests that the output of a request does not depend on other requests.

use futures::future::join_all;
use skep_model::Sampling;

use super::fixture::{engine, engine_with, generate, greedy, ids_together};
use crate::{EngineOptions, GenerateRequest};

fn requests() -> Vec<GenerateRequest> {
    let prompts = [
        "a",
        "The quick brown fox",
        "jumps over the lazy dog and then sleeps for a while",
        "{\"key\": ",
        "zzz",
    ];
    let mut requests: Vec<_> = prompts.iter().map(|prompt| greedy(prompt, 24)).collect();
    requests.push(greedy(&"long prompt ".repeat(20), 30));
    requests.push(greedy(&"another long prompt ".repeat(15), 10));
    let mut drawn = greedy("drawn", 24);
    drawn.sampling = Sampling { temperature: 1.0, top_p: 0.95, ..Sampling::default() };
    drawn.seed = Some(7);
    requests.push(drawn);
    requests
}

async fn alone(request: GenerateRequest) -> Vec<u32> {
    generate(&engine(), request).await.unwrap().ids
}

#[tokio::test]
async fn output_does_not_depend_on_the_batch() {
    let expected = join_all(requests().into_iter().map(alone)).await;
    assert_eq!(ids_together(&engine(), &requests()).await, expected);
}

#[tokio::test]
async fn output_does_not_depend_on_how_prefill_is_cut() {
    let expected = join_all(requests().into_iter().map(alone)).await;
    for step_tokens in [8, 17, 64] {
        let engine =
            engine_with(4096, EngineOptions { step_tokens: Some(step_tokens), ..EngineOptions::default() });
        assert_eq!(ids_together(&engine, &requests()).await, expected, "{step_tokens} tokens per step");
    }
}

#[tokio::test]
async fn preempted_sequences_continue_where_they_were() {
    let requests = || (0..6).map(|n| greedy(&format!("request {n} of several"), 150)).collect::<Vec<_>>();
    let expected = join_all(requests().into_iter().map(alone)).await;
    let engine = engine_with(256, EngineOptions::default());
    assert_eq!(ids_together(&engine, &requests()).await, expected);
    assert!(engine.stats().preemptions > 0, "the pool was too large for the test to mean anything");
}

#[tokio::test]
async fn draws_depend_on_the_seed() {
    let engine = engine();
    let draw = async |seed: Option<u64>| {
        let mut request = greedy("seed", 32);
        request.sampling = Sampling::default();
        request.seed = seed;
        generate(&engine, request).await.unwrap().ids
    };
    assert_eq!(draw(Some(1)).await, draw(Some(1)).await);
    assert_ne!(draw(Some(1)).await, draw(Some(2)).await);
    assert_ne!(draw(None).await, draw(None).await);
}
