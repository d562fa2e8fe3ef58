//! A model whose layers with a window have few pages answers as one whose layers all have the same pages.

use std::path::Path;

use futures::future::join_all;
use serde_json::{Value, json};
use skep_model::{Checkpoint, ExecutorOptions, ModelWeights, Sampling};

use super::fixture::{Generated, executor_options, generate, greedy, loaded};
use crate::{Constraint, Engine, EngineError, EngineOptions, GenerateRequest};

/// Pages for the windows of few sequences: 16 tokens each, and steps of 64.
const FEW: usize = 192;

fn engine(window_tokens: Option<usize>) -> Engine {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/fixtures/tiny/gemma3");
    let checkpoint = Checkpoint::open(&path).expect("the fixture opens");
    let options = ExecutorOptions { window_tokens, max_batch_tokens: 64, ..executor_options(2048) };
    let weights = ModelWeights::load(&checkpoint, &options).expect("the fixture loads");
    let executor = weights.executor(options).expect("the executor starts");
    assert_eq!(executor.windows().is_some(), window_tokens.is_some());
    Engine::start(loaded(&checkpoint, executor), EngineOptions::default()).expect("the engine starts")
}

#[tokio::test]
async fn answers_do_not_depend_on_the_pages_of_windows() {
    let (few, all) = (engine(Some(FEW)), engine(None));
    let prompts = ["one two three, ", "another text, ", "one two three and four, ", "one two three, "];
    let requests: Vec<_> = prompts.iter().map(|prompt| greedy(&prompt.repeat(8), 80)).collect();
    for round in 0..3 {
        let found = join_all(requests.iter().map(|request| generate(&few, request.clone()))).await;
        for (found, request) in found.into_iter().zip(&requests) {
            let expected = generate(&all, request.clone()).await.unwrap().ids;
            assert_eq!(found.unwrap().ids, expected, "round {round}");
        }
    }
}

#[tokio::test]
async fn a_conversation_is_continued_from_its_last_window() {
    let (few, all) = (engine(Some(FEW)), engine(None));
    let mut request = greedy(&"a longer conversation, ".repeat(8), 40);
    for turn in 0..3 {
        let found = generate(&few, request.clone()).await.unwrap();
        let expected = generate(&all, request.clone()).await.unwrap();
        assert_eq!(found.ids, expected.ids, "turn {turn}");
        let cached = found.finished.usage.cached_tokens;
        // Only without windows, a conversation continues within a page.
        assert_eq!(cached, expected.finished.usage.cached_tokens / 16 * 16, "turn {turn}");
        assert_eq!(cached > 0, turn > 0);
        request.prompt.extend(&found.ids);
        request.prompt.extend("And then?".bytes().map(u32::from));
    }
}

#[tokio::test]
async fn a_prefix_whose_window_is_gone_is_computed_again() {
    let (few, all) = (engine(Some(FEW)), engine(None));
    let long = greedy(&"a beginning that many have, ".repeat(12), 30);
    generate(&few, long.clone()).await.unwrap();
    let mut other = long.clone();
    other.prompt.truncate(100);
    other.prompt.extend("but another end".bytes().map(u32::from));
    let found = generate(&few, other.clone()).await.unwrap();
    assert_eq!(found.finished.usage.cached_tokens, 0, "its pages gave way to those after them");
    assert_eq!(found.ids, generate(&all, other.clone()).await.unwrap().ids);
    let again = generate(&few, other).await.unwrap();
    assert!(again.finished.usage.cached_tokens >= 96, "{:?}", again.finished.usage);
    assert_eq!(again.ids, found.ids);
}

/// Returns a request for a string that is held until it has been checked.
fn checked(schema: Value, seed: u64) -> GenerateRequest {
    GenerateRequest {
        // Random weights produce as much white space as they may.
        sampling: Sampling {
            temperature: 1.0,
            logit_bias: vec![(9, -50.0), (10, -50.0), (13, -50.0), (32, -50.0)],
            ..Sampling::default()
        },
        seed: Some(seed),
        ignore_eos: false,
        constraint: Some(Constraint::JsonSchema(schema)),
        ..greedy("output: ", 400)
    }
}

#[tokio::test]
async fn a_value_that_is_held_needs_no_more_pages_than_its_window() {
    let (few, all) = (engine(Some(FEW)), engine(None));
    let schema = json!({"type": "string", "pattern": "^[ab]{240}$", "not": {"enum": ["a"]}});
    let found = generate(&few, checked(schema.clone(), 1)).await.unwrap();
    assert!(found.ids.len() > FEW, "{}", found.text);
    assert_eq!(found.ids, generate(&all, checked(schema, 1)).await.unwrap().ids);
}

#[tokio::test]
async fn a_rollback_behind_the_window_computes_the_window_again() {
    let (few, all) = (engine(Some(FEW)), engine(None));
    let outcome = |run: Result<Generated, EngineError>| match run {
        Ok(run) => format!("{:?} after {} tokens", run.ids, run.finished.usage.rolled_back_tokens),
        Err(error) => format!("{error:?}"),
    };
    // A string with a wrong first letter is refused at its end, and drawn again from ever earlier letters on.
    for wrong in ["^a", "^b"] {
        let schema = json!({"type": "string", "pattern": "^[ab]{60}$", "not": {"pattern": wrong}});
        for seed in 0..4 {
            let found = outcome(generate(&few, checked(schema.clone(), seed)).await);
            let expected = outcome(generate(&all, checked(schema.clone(), seed)).await);
            assert_eq!(found, expected, "seed {seed}, not {wrong}");
        }
    }
    assert_eq!(all.stats().preemptions, 0);
    assert!(few.stats().preemptions > 0, "no rollback was longer than the window");
}
