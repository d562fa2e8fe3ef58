//! Tests that starting the next step before its tokens are known changes no output.

use super::executors::Ahead;
use super::fixture::{generate, greedy, ids_together, model};
use crate::{Engine, EngineOptions, GenerateRequest, Speculation};

fn engine(kv_tokens: usize, speculation: Speculation) -> (Engine, Ahead) {
    let ahead = Ahead::default();
    let watched = ahead.clone();
    let options = EngineOptions { speculation, ..EngineOptions::default() };
    let model = model(kv_tokens, move |executor| Box::new(watched.watch(executor)));
    (Engine::start(model, options).expect("the engine starts"), ahead)
}

fn requests() -> Vec<GenerateRequest> {
    let mut requests: Vec<_> =
        (0..4).map(|n| greedy(&format!("request {n} of several"), 30 + 40 * n)).collect();
    requests[1].stop = vec!["e".to_owned()];
    requests[2].top_logprobs = Some(2);
    requests
}

#[tokio::test]
async fn every_decode_step_of_a_single_sequence_is_started_ahead() {
    let (engine, ahead) = engine(4096, Speculation::Off);
    let run = generate(&engine, greedy("The quick brown fox", 40)).await.unwrap();
    let counts = ahead.counts();
    assert_eq!((run.ids.len(), counts.used, counts.forgotten), (40, 39, 0));
}

#[tokio::test]
async fn outputs_match_an_engine_without_lookahead() {
    let plain = super::fixture::engine();
    let expected = ids_together(&plain, &requests()).await;
    for (kv_tokens, speculation) in
        [(4096, Speculation::Off), (256, Speculation::Off), (4096, Speculation::prompt_lookup())]
    {
        let (engine, ahead) = engine(kv_tokens, speculation);
        assert_eq!(ids_together(&engine, &requests()).await, expected, "{kv_tokens} {speculation:?}");
        assert!(ahead.counts().used > 0, "{kv_tokens} {speculation:?}: {:?}", ahead.counts());
    }
}
