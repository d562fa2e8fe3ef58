//! Tests that draws with penalties are the same as if all tokens were marked and counted for each row, and that only
//! those of drafts are.

use std::sync::{Arc, Mutex};

use serde_json::json;
use skep_model::{CpuExecutor, Executor, LogitRow, ModelError, RowOutput, Sampling};

use super::executors::Ahead;
use super::fixture::{generate, greedy, ids_together, model, together};
use super::intercepted::{Intercepted, Interceptor};
use crate::{Constraint, DraftLimits, Engine, EngineOptions, GenerateRequest, Speculation};

/// Draws each row a second time, without the tokens that its sequence has marked and counted, and counts the rows.
#[derive(Clone, Default)]
struct Redraws(Arc<Mutex<RedrawCounts>>);

#[derive(Clone, Copy, Debug, Default)]
struct RedrawCounts {
    rows: usize,
    penalised_rows: usize,
    /// Tokens of penalised rows that their sequences had not marked.
    unmarked: usize,
    /// Tokens of outputs of penalised rows that their sequences had not counted.
    uncounted: usize,
}

impl Redraws {
    fn counts(&self) -> RedrawCounts {
        *self.0.lock().unwrap()
    }
}

impl Interceptor for Redraws {
    fn sample(
        &mut self,
        executor: &mut CpuExecutor,
        rows: &[LogitRow<'_>],
    ) -> Result<Vec<RowOutput>, ModelError> {
        let drawn = executor.sample(rows)?;
        let (mut again, mut counts) = (rows.to_vec(), self.0.lock().unwrap());
        for row in &mut again {
            let LogitRow::Sample(row) = row else { continue };
            let (seen, occurrences) = (row.seen.take(), row.occurrences.take());
            assert_eq!(seen.is_some(), row.sampling.repetition_penalty != 1.0);
            assert_eq!(occurrences.is_some(), row.sampling.presence_penalty != 0.0);
            counts.rows += 1;
            if let Some(occurrences) = occurrences {
                counts.uncounted += row.output.len() - occurrences.counted();
            }
            if let Some(seen) = seen {
                counts.penalised_rows += 1;
                counts.unmarked += row.prompt.len() + row.output.len() - seen.marked();
            }
        }
        assert_eq!(drawn, executor.sample(&again)?);
        Ok(drawn)
    }
}

fn engine(kv_tokens: usize, speculation: Speculation) -> (Engine, Redraws) {
    let redraws = Redraws::default();
    let interceptor = redraws.clone();
    let model = model(kv_tokens, move |executor| Box::new(Intercepted { executor, interceptor }));
    let options = EngineOptions { speculation, ..EngineOptions::default() };
    (Engine::start(model, options).expect("the engine starts"), redraws)
}

/// Drafts everything that can be predicted.
fn eager() -> Speculation {
    Speculation::PromptLookup(DraftLimits { adaptive: false, ..DraftLimits::default() })
}

/// Returns a request for an output that repeats itself, and now and then does not.
fn repetitive(seed: u64) -> GenerateRequest {
    let sampling = Sampling {
        top_k: 2,
        repetition_penalty: 1.05,
        frequency_penalty: 0.02,
        presence_penalty: 0.05,
        logit_bias: "abcd".bytes().map(|letter| (u32::from(letter), 4.0)).collect(),
        ..Sampling::default()
    };
    GenerateRequest { sampling, seed: Some(seed), ..greedy(&"one two three, ".repeat(6), 80) }
}

/// Returns a request for a list whose items must differ, which a mask cannot enforce.
fn unique(seed: u64) -> GenerateRequest {
    let schema = json!({"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "minItems": 4, "maxItems": 5,
                        "uniqueItems": true});
    let sampling = Sampling {
        repetition_penalty: 1.1,
        frequency_penalty: 0.05,
        presence_penalty: 0.1,
        logit_bias: vec![(9, -50.0), (10, -50.0), (13, -50.0), (32, -3.0)],
        ..Sampling::default()
    };
    GenerateRequest {
        sampling,
        seed: Some(seed),
        ignore_eos: false,
        constraint: Some(Constraint::JsonSchema(schema)),
        ..greedy("output: ", 400)
    }
}

#[tokio::test]
async fn without_drafts_a_row_marks_and_counts_no_token() {
    let (engine, redraws) = engine(4096, Speculation::Off);
    together(&engine, &[repetitive(0), repetitive(1), greedy("a request without a penalty", 40)]).await;
    let counts = redraws.counts();
    assert_eq!((counts.rows, counts.penalised_rows), (200, 160));
    assert_eq!((counts.unmarked, counts.uncounted), (0, 0));
}

#[tokio::test]
async fn a_row_after_a_draft_marks_and_counts_the_draft_alone() {
    let (plain, _) = engine(4096, Speculation::Off);
    let (engine, redraws) = engine(4096, eager());
    for seed in 0..20 {
        let expected = generate(&plain, repetitive(seed)).await.unwrap();
        assert_eq!(generate(&engine, repetitive(seed)).await.unwrap().ids, expected.ids, "seed {seed}");
    }
    let (stats, counts) = (engine.stats(), redraws.counts());
    assert!(stats.accepted_tokens > 0 && stats.rejected_tokens > 0, "{stats:?}");
    let most = DraftLimits::default().max_tokens;
    assert!(counts.unmarked > 0 && counts.unmarked < counts.rows * most, "{counts:?}");
    assert_eq!(counts.uncounted, counts.unmarked, "both are the tokens of drafts");
}

#[tokio::test]
async fn tokens_that_are_rolled_back_are_not_penalised() {
    let (alone, _) = engine(4096, Speculation::Off);
    let (mut expected, mut rolled_back) = (Vec::new(), 0);
    for seed in 0..8 {
        let run = generate(&alone, unique(seed)).await.unwrap();
        rolled_back += run.finished.usage.rolled_back_tokens;
        expected.push(run.ids);
    }
    assert!(rolled_back > 0);
    // 512 tokens are not enough for all of them at once.
    let requests: Vec<_> = (0..8).map(unique).collect();
    for (kv_tokens, speculation) in [(4096, eager()), (512, Speculation::Off)] {
        let (engine, _) = engine(kv_tokens, speculation);
        assert_eq!(ids_together(&engine, &requests).await, expected, "{kv_tokens} tokens");
    }
}

#[tokio::test]
async fn steps_that_start_ahead_draw_the_same_tokens() {
    let mut requests: Vec<_> = (0..8).map(repetitive).collect();
    // A sequence that ends leaves a row of the started step behind.
    requests[1].stop = vec!["d".to_owned()];
    requests.extend([unique(0), unique(1)]);
    let (plain, _) = engine(4096, Speculation::Off);
    let expected = ids_together(&plain, &requests).await;
    // 512 tokens are not enough for all of them at once.
    for kv_tokens in [4096, 512] {
        let ahead = Ahead::default();
        let watched = ahead.clone();
        let model = model(kv_tokens, move |executor| Box::new(watched.watch(executor)));
        let options = EngineOptions { speculation: Speculation::Off, ..EngineOptions::default() };
        let engine = Engine::start(model, options).expect("the engine starts");
        assert_eq!(ids_together(&engine, &requests).await, expected, "{kv_tokens} tokens");
        assert!(ahead.counts().used > 0);
    }
}
