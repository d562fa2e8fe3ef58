//! Tests that drafts change the number of steps that an output takes, and nothing else.

use serde_json::json;
use skep_model::Sampling;

use super::fixture::{EOS, Generated, engine_with, generate, greedy, together};
use crate::{
    Constraint, DraftLimits, Engine, EngineOptions, EngineStats, FinishReason, GenerateRequest, Speculation,
};

/// Returns an engine that drafts everything that can be predicted, so that the tests do not depend on the
/// duration of steps.
fn speculating(kv_tokens: usize) -> Engine {
    let limits = DraftLimits { adaptive: false, ..DraftLimits::default() };
    let speculation = Speculation::PromptLookup(limits);
    engine_with(kv_tokens, EngineOptions { speculation, ..EngineOptions::default() })
}

fn plain(kv_tokens: usize) -> Engine {
    engine_with(kv_tokens, EngineOptions { speculation: Speculation::Off, ..EngineOptions::default() })
}

/// Returns a request for a repetitive output: a model with random weights repeats itself when it is restricted
/// to a few letters.
fn repetitive(max_tokens: usize) -> GenerateRequest {
    let mut request = greedy(&"one two three, ".repeat(6), max_tokens);
    request.sampling.logit_bias = few_letters();
    request
}

fn few_letters() -> Vec<(u32, f32)> {
    "abcd".bytes().map(|letter| (u32::from(letter), 4.0)).collect()
}

/// Returns a request whose output now and then leaves the earlier text, and returns to it.
fn drawn(seed: u64) -> GenerateRequest {
    let mut request = repetitive(80);
    request.sampling = Sampling { temperature: 1.0, top_k: 2, ..request.sampling };
    request.seed = Some(seed);
    request
}

/// Returns everything that a caller receives, except the times and the counts of drafts.
fn observed(run: &Generated) -> (&str, &[u32], &FinishReason, u32, Vec<Option<u32>>) {
    let logprobs = run.logprobs.iter().map(|l| l.as_ref().map(|l| l.id)).collect();
    (&run.text, &run.ids, run.reason(), run.finished.usage.forced_tokens, logprobs)
}

/// Runs the requests one after the other with and without drafts. Returns the totals with drafts.
async fn assert_same_alone(requests: &[GenerateRequest]) -> EngineStats {
    let (with, without) = (speculating(4096), plain(4096));
    for request in requests {
        let expected = generate(&without, request.clone()).await.unwrap();
        let found = generate(&with, request.clone()).await.unwrap();
        assert_eq!(observed(&found), observed(&expected), "{request:?}");
        for (found, expected) in found.logprobs.iter().flatten().zip(expected.logprobs.iter().flatten()) {
            assert!((found.logprob - expected.logprob).abs() < 1e-3, "{found:?} {expected:?}");
        }
    }
    if requests.iter().all(|request| request.constraint.is_none()) {
        assert_eq!((without.stats().accepted_tokens, without.stats().rejected_tokens), (0, 0));
    }
    with.stats()
}

#[tokio::test]
async fn a_repetitive_output_takes_fewer_steps() {
    let (with, without) = (speculating(4096), plain(4096));
    let expected = generate(&without, repetitive(200)).await.unwrap();
    let run = generate(&with, repetitive(200)).await.unwrap();
    assert_eq!(run.ids, expected.ids);
    let usage = run.finished.usage;
    assert!(usage.accepted_tokens > 50, "{usage:?}");
    assert_eq!(usage.completion_tokens, 200, "rejected drafts are not output: {usage:?}");
    let (with, without) = (with.stats(), without.stats());
    assert_eq!(with.steps + u64::from(usage.accepted_tokens), without.steps);
    assert_eq!(with.generated_tokens, 200);
    assert_eq!(with.accepted_tokens, u64::from(usage.accepted_tokens));
    assert_eq!(with.rejected_tokens, u64::from(usage.rejected_tokens));
}

#[tokio::test]
async fn greedy_output_is_the_same() {
    let prompts = ["a", "The quick brown fox", "{\"key\": \"value\", \"key\": \"val", "zzzzzzzzzz"];
    let mut requests: Vec<_> = prompts.iter().map(|prompt| greedy(prompt, 120)).collect();
    requests.push(repetitive(300));
    let stats = assert_same_alone(&requests).await;
    assert!(stats.accepted_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn every_seed_gives_the_same_draws() {
    let requests: Vec<_> = (0..20).map(drawn).collect();
    let stats = assert_same_alone(&requests).await;
    assert!(stats.accepted_tokens > 0 && stats.rejected_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn penalties_and_biases_see_the_drafts_before_a_row() {
    let mut requests = Vec::new();
    for sampling in [
        Sampling { frequency_penalty: 0.05, ..Sampling::default() },
        Sampling { presence_penalty: 0.4, ..Sampling::default() },
        Sampling { repetition_penalty: 1.05, min_p: 0.1, ..Sampling::default() },
    ] {
        for temperature in [0.0, 0.5] {
            let sampling = Sampling { temperature, logit_bias: few_letters(), ..sampling.clone() };
            requests.push(GenerateRequest { sampling, seed: Some(3), ..repetitive(120) });
        }
    }
    let stats = assert_same_alone(&requests).await;
    assert!(stats.accepted_tokens > 0 && stats.rejected_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn schemas_and_patterns_hold_at_every_position_of_a_draft() {
    let city = json!({"type": "object", "additionalProperties": false, "required": ["city", "state"],
        "properties": {"city": {"type": "string", "maxLength": 6, "pattern": "^[ab]*$"},
                       "state": {"enum": ["open", "shut"]}}});
    let cities = json!({"type": "array", "items": city, "minItems": 3, "maxItems": 8});
    let mut requests = Vec::new();
    for constraint in [
        Constraint::JsonSchema(cities),
        Constraint::Regex("(ab|ba|abba){10,40}".to_string()),
        Constraint::Regex("(one two (three|four), ){2,12}".to_string()),
        Constraint::JsonObject,
    ] {
        for seed in 0..5 {
            let mut request = GenerateRequest { constraint: Some(constraint.clone()), ..drawn(seed) };
            request.max_tokens = Some(250);
            request.ignore_eos = seed % 2 == 0;
            requests.push(request);
        }
    }
    let stats = assert_same_alone(&requests).await;
    assert!(stats.accepted_tokens > 0 && stats.forced_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn stop_strings_limits_and_the_end_token_cut_inside_a_draft() {
    let base = |max_tokens: usize| GenerateRequest { max_tokens: Some(max_tokens), ..drawn(5) };
    let free = generate(&plain(4096), base(120)).await.unwrap();
    let mut requests: Vec<_> = (1..40).map(base).collect();
    let mut ends = std::collections::BTreeSet::new();
    for stop in free.text.as_bytes().windows(5).filter_map(|bytes| str::from_utf8(bytes).ok()) {
        if ends.insert(free.text.find(stop)) {
            requests.push(GenerateRequest { stop: vec![stop.to_string()], ..base(120) });
        }
    }
    assert!(ends.len() > 10, "the text has stop strings to try: {}", free.text);
    let mut ending = repetitive(120);
    ending.prompt.extend([EOS, 1, 2, 3, EOS, 1, 2, 3]);
    ending.ignore_eos = false;
    ending.sampling.logit_bias.push((EOS, 4.0));
    requests.push(ending);
    let stats = assert_same_alone(&requests).await;
    assert!(stats.accepted_tokens > 0, "{stats:?}");
}

#[tokio::test]
async fn logprobs_are_those_of_every_row() {
    let requests: Vec<_> =
        (0..4).map(|seed| GenerateRequest { top_logprobs: Some(3), ..drawn(seed) }).collect();
    let stats = assert_same_alone(&requests).await;
    assert!(stats.accepted_tokens > 0, "{stats:?}");
    let mut scored = repetitive(60);
    scored.prompt_logprobs = Some(1);
    scored.top_logprobs = Some(1);
    let (with, without) = (speculating(4096), plain(4096));
    let found = generate(&with, scored.clone()).await.unwrap();
    let expected = generate(&without, scored).await.unwrap();
    assert_eq!(observed(&found), observed(&expected));
    assert_eq!(found.prompt_logprobs.unwrap().len(), expected.prompt_logprobs.unwrap().len());
}

/// Returns requests of all kinds, some long enough to be prefilled in chunks alongside the drafts of others.
fn mixed() -> Vec<GenerateRequest> {
    let mut requests: Vec<_> = (0..4).map(drawn).collect();
    requests.push(repetitive(150));
    requests.push(greedy(&"a long prompt that goes on, ".repeat(12), 60));
    requests.push(GenerateRequest {
        constraint: Some(Constraint::Regex("(one two (three|four), ){2,12}".to_string())),
        ..drawn(9)
    });
    requests
}

#[tokio::test]
async fn other_requests_in_the_batch_change_nothing() {
    let mut expected = Vec::new();
    for request in mixed() {
        expected.push(generate(&plain(4096), request).await.unwrap());
    }
    let engine = speculating(4096);
    for (found, expected) in together(&engine, &mixed()).await.iter().zip(&expected) {
        assert_eq!(observed(found), observed(expected));
    }
    assert!(engine.stats().accepted_tokens > 0);
    let options = EngineOptions {
        step_tokens: Some(12),
        speculation: Speculation::PromptLookup(DraftLimits { max_tokens: 40, adaptive: false }),
        ..EngineOptions::default()
    };
    let narrow = engine_with(4096, options);
    for (found, expected) in together(&narrow, &mixed()).await.iter().zip(&expected) {
        assert_eq!(observed(found), observed(expected));
    }
}

#[tokio::test]
async fn drafts_change_nothing_while_pages_run_out() {
    let requests: Vec<_> =
        (0..6).map(|n| greedy(&format!("{n} request {n} of several, request {n} of several"), 150)).collect();
    let mut expected = Vec::new();
    for request in &requests {
        expected.push(generate(&plain(4096), request.clone()).await.unwrap());
    }
    let engine = speculating(288);
    for (found, expected) in together(&engine, &requests).await.iter().zip(&expected) {
        assert_eq!(observed(found), observed(expected));
    }
    let stats = engine.stats();
    assert!(stats.preemptions > 0 && stats.accepted_tokens > 0, "{stats:?}");
    engine.drain(std::time::Duration::from_secs(60)).await;
    assert_eq!(engine.stats().pages_free, engine.stats().pages_total);
}

#[tokio::test]
async fn drafts_preempt_no_sequence() {
    // There is room for both outputs to the last page, and for none of the drafts beyond.
    let request = |n: usize| greedy(&format!("{n}{}", "ab".repeat(7)), 64 - 15 + 1);
    let engine = speculating(2 * 64 + 16);
    together(&engine, &[request(1), request(2)]).await;
    let stats = engine.stats();
    assert!(stats.accepted_tokens > 0 && stats.preemptions == 0, "{stats:?}");
}

#[tokio::test]
async fn accepted_drafts_are_cached_and_rejected_ones_are_not() {
    let engine = speculating(4096);
    let first = generate(&engine, drawn(1)).await.unwrap();
    assert!(first.finished.usage.rejected_tokens > 0, "{:?}", first.finished.usage);
    let mut next = repetitive(40);
    next.prompt.extend(&first.ids);
    next.prompt.extend(&first.ids[..20]);
    let warm = generate(&engine, next.clone()).await.unwrap();
    let computed = repetitive(0).prompt.len() + first.ids.len() - 1;
    assert!(warm.finished.usage.cached_tokens as usize >= computed / 16 * 16);
    assert_eq!(warm.ids, generate(&plain(4096), next).await.unwrap().ids);
}

#[tokio::test]
async fn consecutive_forced_tokens_take_one_step_even_beside_drafts() {
    // Three letters are drawn; the text between them is forced.
    let pattern = "[ab] and then, after a while, [ab] and then, after a while, [ab] and that is all";
    let mut request = greedy("x", 200);
    request.constraint = Some(Constraint::Regex(pattern.to_string()));
    let without = plain(4096);
    let expected = generate(&without, request.clone()).await.unwrap();
    assert_eq!(expected.ids.len() - 3, expected.finished.usage.forced_tokens as usize);
    assert_eq!(without.stats().steps, 3, "the prompt and two letters with the text forced before them");

    // The prompt contains the whole output, so the drafts hold the forced tokens too.
    let said = format!("{} {}", expected.text, &expected.text);
    request.prompt = said.bytes().map(u32::from).collect();
    request.sampling.logit_bias = vec![(u32::from(expected.text.as_bytes()[0]), 100.0)];
    let (with, without) = (speculating(4096), plain(4096));
    let expected = generate(&without, request.clone()).await.unwrap();
    let found = generate(&with, request).await.unwrap();
    assert_eq!(observed(&found), observed(&expected));
    assert!(with.stats().steps <= without.stats().steps, "{:?}", with.stats());
}

#[tokio::test]
async fn adaptive_drafting_keeps_the_output() {
    let engine = engine_with(
        4096,
        EngineOptions { speculation: Speculation::prompt_lookup(), ..EngineOptions::default() },
    );
    let expected = generate(&plain(4096), repetitive(300)).await.unwrap();
    assert_eq!(generate(&engine, repetitive(300)).await.unwrap().ids, expected.ids);
}
