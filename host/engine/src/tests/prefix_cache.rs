//! A cached prefix saves work and changes nothing.

use super::fixture::{engine, first_token, generate, greedy};
use crate::{GenerateRequest, TokenEvent};

const PROMPT: &str = "You are a helpful assistant that answers in one short sentence. Question: why?";

#[tokio::test]
async fn a_warm_cache_gives_the_same_output() {
    let engine = engine();
    let cold = generate(&engine, greedy(PROMPT, 40)).await.unwrap();
    let warm = generate(&engine, greedy(PROMPT, 40)).await.unwrap();
    assert_eq!(cold.finished.usage.cached_tokens, 0);
    assert_eq!(warm.finished.usage.cached_tokens as usize, (PROMPT.len() - 1) / 16 * 16);
    assert_eq!(cold.ids, warm.ids);
}

#[tokio::test]
async fn the_next_turn_finds_the_output_of_the_last() {
    let engine = engine();
    let first = generate(&engine, greedy(PROMPT, 40)).await.unwrap();
    let mut next = greedy(PROMPT, 20);
    next.prompt.extend(&first.ids);
    next.prompt.extend("And why that?".bytes().map(u32::from));
    let warm = generate(&engine, next.clone()).await.unwrap();
    // The last token produced was never computed.
    let computed = PROMPT.len() + first.ids.len() - 1;
    assert_eq!(warm.finished.usage.cached_tokens as usize, computed / 16 * 16);
    let cold = generate(&super::fixture::engine(), next).await.unwrap();
    assert_eq!(cold.ids, warm.ids);
}

#[tokio::test]
async fn a_prompt_is_shared_while_its_first_user_still_runs() {
    let engine = engine();
    let mut running = engine.generate(greedy(PROMPT, 200)).unwrap();
    first_token(&mut running).await;
    let mut second = engine.generate(greedy(PROMPT, 1)).unwrap();
    let Some(Ok(TokenEvent::Started { cached_tokens, .. })) = second.next().await else { panic!("no start") };
    assert_eq!(cached_tokens as usize, (PROMPT.len() - 1) / 16 * 16);
}

#[tokio::test]
async fn tenants_do_not_see_each_others_prefixes() {
    let engine = engine();
    let of = |tenant: &str| -> GenerateRequest {
        let mut request = greedy(PROMPT, 4);
        request.affinity.tenant = tenant.to_string();
        request
    };
    generate(&engine, of("one")).await.unwrap();
    assert_eq!(generate(&engine, of("two")).await.unwrap().finished.usage.cached_tokens, 0);
    assert!(generate(&engine, of("one")).await.unwrap().finished.usage.cached_tokens > 0);
}

#[tokio::test]
async fn a_cache_smaller_than_the_work_evicts_and_stays_right() {
    let small = super::fixture::engine_with(128, crate::EngineOptions::default());
    for round in 0..3 {
        for prompt in ["first topic ", "second topic ", "third topic "] {
            let request = greedy(&prompt.repeat(5), 20);
            let expected = generate(&engine(), request.clone()).await.unwrap().ids;
            assert_eq!(generate(&small, request).await.unwrap().ids, expected, "round {round}, {prompt}");
        }
    }
}
