//! Tests of text, stop strings, scores and how a generation finishes.

use std::time::Duration;

use super::fixture::{EOS, engine, engine_with, generate, greedy};
use crate::{Constraint, EngineOptions, FinishReason, GenerateRequest};

/// Returns a request for letters only, so that text and bytes are the same.
fn letters(max_tokens: usize) -> GenerateRequest {
    let mut request = greedy("letters: ", max_tokens);
    request.constraint = Some(Constraint::Regex("[a-z]{64}".to_string()));
    request
}

#[tokio::test]
async fn a_stop_string_across_tokens_ends_the_text_before_it() {
    let engine = engine();
    let free = generate(&engine, letters(40)).await.unwrap().text;
    assert_eq!(free.len(), 40);
    for (from, to) in [(0, 1), (5, 9), (30, 33), (38, 40)] {
        let stop = &free[from..to];
        let mut request = letters(40);
        request.stop = vec!["0 never".to_string(), stop.to_string()];
        let run = generate(&engine, request).await.unwrap();
        let at = free.find(stop).unwrap();
        assert_eq!(run.text, free[..at]);
        assert_eq!(*run.reason(), FinishReason::Stop(stop.to_string()));
        assert_eq!(run.ids.len(), at + stop.len(), "the tokens of the stop string were produced");
    }
}

#[tokio::test]
async fn text_held_back_for_a_stop_string_is_released_at_the_end() {
    let engine = engine();
    let free = generate(&engine, letters(12)).await.unwrap().text;
    let mut request = letters(12);
    request.stop = vec![format!("{}!", &free[9..])];
    let run = generate(&engine, request).await.unwrap();
    assert_eq!(run.text, free);
    assert_eq!(*run.reason(), FinishReason::Length);
    assert!(!run.finished.text_rest.is_empty());
}

#[tokio::test]
async fn the_end_token_ends_the_output_unless_it_is_ignored() {
    let engine = engine();
    let mut request = greedy("end", 8);
    request.sampling.logit_bias = vec![(EOS, 100.0)];
    request.ignore_eos = false;
    let run = generate(&engine, request.clone()).await.unwrap();
    assert_eq!((run.reason(), run.ids.as_slice(), run.text.as_str()), (&FinishReason::Eos, &[EOS][..], ""));
    request.ignore_eos = true;
    let run = generate(&engine, request).await.unwrap();
    assert_eq!((run.reason(), run.ids.len()), (&FinishReason::Length, 8));
    assert!(!run.ids.contains(&EOS));
}

#[tokio::test]
async fn with_max_tokens_zero_only_the_prompt_is_computed() {
    let engine = engine();
    let run = generate(&engine, greedy("only the prompt, please", 0)).await.unwrap();
    assert_eq!((run.reason(), run.ids.len()), (&FinishReason::Length, 0));
    engine.drain(Duration::from_secs(60)).await;
    assert_eq!(engine.stats().pages_cached, 2, "the second one is filled in part");
}

#[tokio::test]
async fn a_scored_prompt_agrees_with_the_logprobs_of_generation() {
    let engine = engine();
    let prompt = "score this, ".repeat(10);
    let mut request = greedy(&prompt, 30);
    request.top_logprobs = Some(2);
    let run = generate(&engine, request.clone()).await.unwrap();

    let mut echo = greedy(&prompt, 0);
    echo.prompt.extend(&run.ids);
    echo.prompt_logprobs = Some(1);
    for step_tokens in [10, 100, 256] {
        let engine =
            engine_with(4096, EngineOptions { step_tokens: Some(step_tokens), ..EngineOptions::default() });
        for _warm in [false, true] {
            let scored = generate(&engine, echo.clone()).await.unwrap();
            assert_eq!(
                scored.finished.usage.cached_tokens, 0,
                "every position is scored, so no prefix is reused"
            );
            let scores = scored.prompt_logprobs.unwrap();
            assert_eq!(scores.len(), echo.prompt.len());
            assert!(scores[0].is_none());
            for (score, generated) in scores[prompt.len()..].iter().zip(&run.logprobs) {
                let (score, generated) = (score.as_ref().unwrap(), generated.as_ref().unwrap());
                assert_eq!(score.id, generated.id);
                assert!((score.logprob - generated.logprob).abs() < 1e-3, "{score:?} {generated:?}");
                assert_eq!((score.top.len(), generated.top.len()), (1, 2));
            }
        }
    }
}

#[tokio::test]
async fn a_prompt_of_one_token_has_one_empty_score() {
    let mut request = greedy("x", 3);
    request.prompt_logprobs = Some(0);
    let run = generate(&engine(), request).await.unwrap();
    assert_eq!(run.prompt_logprobs, Some(vec![None]));
    assert_eq!(run.ids.len(), 3);
}
