//! Tests that a constrained output equals masked draws made one after the other: drafts, forced tokens and
//! resumption change nothing.

use std::sync::Arc;

use serde_json::json;
use skep_model::{Batch, BatchSequence, Executor, LogitRow, LogitsWanted, PageId, SampleRow, Sampling};

use super::fixture::{EOS, executor, generate, greedy, merging_engine, merging_tokenizer};
use crate::constraint::ConstraintCompiler;
use crate::{Constraint, DraftLimits, Engine, GenerateRequest, Speculation};

/// Returns the tokens of a request, computed in the plainest way: a mask, a draw, and the whole sequence
/// computed again for the next one.
fn masked_draws(request: &GenerateRequest) -> Vec<u32> {
    let tokenizer = Arc::new(merging_tokenizer());
    let compiler = ConstraintCompiler::new(&tokenizer, 320, &[EOS], "reference").unwrap();
    let mut state = compiler.compile(request.constraint.as_ref().unwrap()).unwrap();
    let (_, mut executor) = executor(1024);
    let mut output = Vec::new();
    while output.len() < request.max_tokens.unwrap() && !state.is_complete() {
        let tokens: Vec<u32> = request.prompt.iter().chain(&output).copied().collect();
        let pages = (0..tokens.len().div_ceil(skep_model::PAGE_TOKENS) as u32).map(PageId).collect();
        let sequence = BatchSequence { tokens, start: 0, pages, logits: LogitsWanted::Tail(1) };
        executor.forward(&Batch { sequences: vec![sequence] }).unwrap();
        let mask = state.mask().unwrap();
        let row = SampleRow {
            row: 0,
            sampling: &request.sampling,
            seed: request.seed.unwrap(),
            step: output.len() as u64,
            mask: Some(mask.words()),
            banned: &[],
            prompt: &request.prompt,
            output: &output,
            seen: None,
            occurrences: None,
            top_logprobs: None,
        };
        let token = executor.sample(&[LogitRow::Sample(row)]).unwrap()[0].token;
        output.push(token);
        if token == EOS {
            break;
        }
        state.accept(token).unwrap();
    }
    output
}

/// Returns an engine that drafts everything that can be predicted, so that the tests do not depend on the
/// duration of steps.
fn eager() -> Engine {
    let limits = DraftLimits { adaptive: false, ..DraftLimits::default() };
    merging_engine(4096, Speculation::PromptLookup(limits))
}

fn forecast() -> Constraint {
    Constraint::JsonSchema(json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 6, "pattern": "^[ab]*$"},
            "days": {"enum": [1, 12, 120]},
            "units": {"enum": ["metric", "imperial"]},
        },
        "required": ["city", "days", "units"],
        "additionalProperties": false,
    }))
}

fn request(constraint: Constraint, prompt: &str, seed: u64) -> GenerateRequest {
    let temperature = if seed.is_multiple_of(4) { 0.0 } else { 0.3 * (seed % 4) as f32 };
    GenerateRequest {
        sampling: Sampling { temperature, ..Sampling::default() },
        seed: Some(seed),
        ignore_eos: false,
        constraint: Some(constraint),
        ..greedy(prompt, 120)
    }
}

fn constraints() -> Vec<Constraint> {
    let tags = json!({"type": "array", "items": {"enum": ["a", "b", "aba"]}, "minItems": 2, "maxItems": 4});
    vec![
        forecast(),
        Constraint::JsonSchema(json!({"type": "object", "properties": {"tags": tags}, "required": ["tags"],
            "additionalProperties": false})),
        Constraint::Regex("(city|days) of the (tags|units), [ab]{2,5} and no more".to_string()),
        Constraint::JsonSchema(json!({"const": {"city": ["a", 12], "days": {"tags": null}}})),
    ]
}

#[tokio::test]
async fn every_seed_gives_the_masked_draws_with_and_without_drafts() {
    let engines = [eager(), merging_engine(4096, Speculation::Off)];
    let mut accepted = 0;
    for (number, constraint) in constraints().into_iter().enumerate() {
        for prompt in ["Answer: ", "{\"city\": \"a\"} then: ", "{\"city\":\"a\"} then: "] {
            for seed in 0..8 {
                let request = request(constraint.clone(), prompt, seed);
                let expected = masked_draws(&request);
                for engine in &engines {
                    let run = generate(engine, request.clone()).await.unwrap();
                    assert_eq!(run.ids, expected, "{number} {prompt:?} {seed}: {}", run.text);
                    accepted += run.finished.usage.accepted_tokens;
                }
            }
        }
    }
    assert!(accepted > 100, "{accepted} drafted tokens were accepted");
}

#[tokio::test]
async fn output_predicted_by_the_format_takes_fewer_steps() {
    let engine = eager();
    // A model with random weights produces what a bias makes it produce.
    let mut request = request(forecast(), "{\"city\": \"a\"} then: ", 4);
    let likely = merging_tokenizer().encode(
        "{\"city\": \"ab\", \"days\": 12, \"units\": \"metric\"}",
        skep_model::SpecialTokens::Literal,
    );
    request.sampling.logit_bias = likely.unwrap().into_iter().map(|id| (id, 30.0)).collect();
    let run = generate(&engine, request.clone()).await.unwrap();
    assert_eq!(run.ids, masked_draws(&request));
    let (usage, stats) = (run.finished.usage, engine.stats());
    assert!(usage.accepted_tokens >= 5, "{usage:?} for {}", run.text);
    assert_eq!(stats.steps, u64::from(usage.completion_tokens - usage.accepted_tokens - usage.forced_tokens));
    assert_eq!(stats.accepted_tokens, u64::from(usage.accepted_tokens));
}

#[tokio::test]
async fn a_resumed_output_continues_with_the_same_draws() {
    let engine = eager();
    for seed in 0..4 {
        let request = request(forecast(), "{\"city\":\"a\"} then: ", seed);
        let whole = generate(&engine, request.clone()).await.unwrap();
        for known in 0..=whole.ids.len() {
            let resume = whole.ids[..known].to_vec();
            let resumed = generate(&engine, GenerateRequest { resume, ..request.clone() }).await.unwrap();
            assert_eq!((&resumed.ids, &resumed.text), (&whole.ids, &whole.text), "after {known}");
        }
    }
}

#[tokio::test]
async fn a_token_is_taken_without_a_draw_only_if_no_other_is_allowed() {
    let engine = eager();
    // A text of longer tokens can be spelled in several ways; a byte that no longer token contains has one
    // spelling.
    let constraint = Constraint::Regex("zzz(city){3}zzz".to_string());
    let run = generate(&engine, request(constraint, "Answer: ", 1)).await.unwrap();
    assert_eq!(run.text, "zzzcitycitycityzzz");
    let usage = run.finished.usage;
    assert!((6..usage.completion_tokens).contains(&usage.forced_tokens), "{usage:?}");
}
