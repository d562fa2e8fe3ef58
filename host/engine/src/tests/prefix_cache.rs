//! Tests that a cached prefix saves work and changes no output.

use futures::future::join_all;

use super::executors::{Gate, Recorder};
use super::fixture::{collect, engine, first_token, generate, greedy, model};
use crate::{Constraint, Engine, EngineOptions, GenerateRequest, TokenEvent};

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
async fn the_next_turn_reuses_the_output_of_the_last() {
    let engine = engine();
    let first = generate(&engine, greedy(PROMPT, 40)).await.unwrap();
    let mut next = greedy(PROMPT, 20);
    next.prompt.extend(&first.ids);
    next.prompt.extend("And why that?".bytes().map(u32::from));
    let warm = generate(&engine, next.clone()).await.unwrap();
    // The last token produced was never computed. The page before it is filled in part.
    let computed = PROMPT.len() + first.ids.len() - 1;
    assert_ne!(computed % 16, 0);
    assert_eq!(warm.finished.usage.cached_tokens as usize, computed);
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
async fn a_cache_smaller_than_the_work_evicts_and_stays_correct() {
    let small = super::fixture::engine_with(128, crate::EngineOptions::default());
    for round in 0..3 {
        for prompt in ["first topic ", "second topic ", "third topic "] {
            let request = greedy(&prompt.repeat(5), 20);
            let expected = generate(&engine(), request.clone()).await.unwrap().ids;
            assert_eq!(generate(&small, request).await.unwrap().ids, expected, "round {round}, {prompt}");
        }
    }
}

/// Returns a request whose prompt positions the recorder can distinguish.
fn recorded(owner: u32, length: usize, max_tokens: usize) -> GenerateRequest {
    let mut request = greedy("", max_tokens);
    request.prompt = Recorder::prompt(owner, length);
    request
}

#[tokio::test]
async fn exactly_the_tokens_not_reported_as_cached_are_computed() {
    let recorder = Recorder::default();
    let model = model(4096, |executor| Box::new(recorder.watch(executor)));
    let engine =
        Engine::start(model, EngineOptions { step_tokens: Some(24), ..EngineOptions::default() }).unwrap();
    for length in [100, 100, 161, 160, 176, 50, 1] {
        let mut request = recorded(0, length, 9);
        // Tokens that the constraint forces at the beginning join the prefill of the prompt, but are not part
        // of the prompt.
        request.constraint = Some(Constraint::Regex("FORCED[A-Z]{3}".to_string()));
        let usage = generate(&engine, request).await.unwrap().finished.usage;
        assert!(usage.forced_tokens >= 6);
        assert_eq!(length - usage.cached_tokens as usize, recorder.take(0, length), "{length} tokens");
    }
}

#[tokio::test]
async fn preempted_sequences_report_only_never_computed_tokens_as_cached() {
    let (recorder, gate) = (Recorder::default(), Gate::default());
    gate.open();
    let model = model(512, |executor| Box::new(recorder.watch_behind(&gate, executor)));
    let engine =
        Engine::start(model, EngineOptions { step_tokens: Some(40), ..EngineOptions::default() }).unwrap();
    for owner in 0..4 {
        generate(&engine, recorded(owner, 64, 1)).await.unwrap();
        recorder.take(owner, 64);
    }
    // All sequences are admitted, because their cached pages fit. They then grow until the pages of all of them no longer fit.
    gate.close();
    let streams: Vec<_> = (0..4).map(|owner| engine.generate(recorded(owner, 96, 160)).unwrap()).collect();
    gate.open();
    let runs = join_all(streams.into_iter().map(collect)).await;
    for (owner, run) in (0..4).zip(runs) {
        let cached = run.unwrap().finished.usage.cached_tokens as usize;
        assert_eq!(96 - cached, recorder.take(owner, 96), "prompt of {owner}");
    }
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.cached_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn sessions_that_start_together_compute_their_common_prompt_once() {
    let gate = Gate::default();
    let model = model(4096, |executor| Box::new(gate.guard(executor)));
    let engine =
        Engine::start(model, EngineOptions { step_tokens: Some(32), ..EngineOptions::default() }).unwrap();
    let streams: Vec<_> = (0..4)
        .map(|session| {
            let mut request = greedy(&format!("{PROMPT} I am number {session}."), 4);
            request.affinity.agent = Some(format!("agent {}", session % 2));
            request.affinity.session = Some(session.to_string());
            engine.generate(request).unwrap()
        })
        .collect();
    gate.open();
    let runs = join_all(streams.into_iter().map(collect)).await;
    let cached: Vec<_> = runs.into_iter().map(|run| run.unwrap().finished.usage.cached_tokens).collect();
    assert_eq!(cached[0], 0);
    // At most one page is computed again, where waiting for it would have taken longer.
    let shared = (PROMPT.len() / 16 * 16) as u32;
    assert!(cached[1..].iter().all(|cached| *cached + 16 >= shared), "{cached:?} of {shared}");
}
