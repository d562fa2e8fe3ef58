//! Tests of values that masks cannot enforce: a wrong one is generated again without being reported, and
//! nothing else changes.

use serde_json::{Value, json};
use skep_model::Sampling;

use super::fixture::{
    EOS, Generated, collect, engine, engine_with, generate, greedy, merging_engine, together,
};
use crate::{
    Constraint, DraftLimits, Engine, EngineError, EngineOptions, FinishReason, GenerateRequest, RolledBack,
    Speculation, TokenEvent,
};

fn request(schema: Value, seed: u64) -> GenerateRequest {
    GenerateRequest {
        // Random weights produce as much white space as they may.
        sampling: Sampling {
            temperature: 1.0,
            logit_bias: vec![(9, -50.0), (10, -50.0), (13, -50.0), (32, -3.0)],
            ..Sampling::default()
        },
        seed: Some(seed),
        ignore_eos: false,
        constraint: Some(Constraint::JsonSchema(schema)),
        ..greedy("output: ", 400)
    }
}

/// Returns a schema with few items to choose from, so that two are often equal.
fn unique() -> Value {
    json!({"type": "array", "items": {"enum": [1, 2, 3, 4, 5]}, "minItems": 4, "maxItems": 5,
           "uniqueItems": true})
}

fn record() -> Value {
    json!({
        "type": "object",
        "properties": {
            "first": {"enum": ["some text", "other text"]},
            "tags": unique(),
            "not_b": {"type": "string", "pattern": "^[ab]{1,2}$", "not": {"enum": ["a", "aa", "ab"]}},
            "last": {"enum": ["some text", "other text"]},
        },
        "required": ["first", "tags", "not_b", "last"],
        "additionalProperties": false,
    })
}

fn assert_valid(schema: &Value, text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let errors: Vec<_> = jsonschema::validator_for(schema)
        .unwrap()
        .iter_errors(&value)
        .map(|error| error.to_string())
        .collect();
    assert!(errors.is_empty(), "{errors:?} in {text}");
}

fn eager() -> Engine {
    let limits = DraftLimits { adaptive: false, ..DraftLimits::default() };
    engine_with(
        4096,
        EngineOptions { speculation: Speculation::PromptLookup(limits), ..EngineOptions::default() },
    )
}

#[tokio::test]
async fn invalid_values_are_generated_again_until_they_are_valid() {
    let engine = engine();
    let mut rolled_back = 0;
    for schema in [unique(), record()] {
        for seed in 0..20 {
            let run = generate(&engine, request(schema.clone(), seed)).await.unwrap();
            assert_valid(&schema, &run.text);
            assert!(!run.reason().cuts_off());
            rolled_back += run.finished.usage.rolled_back_tokens;
        }
    }
    assert!(rolled_back > 100, "{rolled_back}");
    assert_eq!(engine.stats().rolled_back_tokens, u64::from(rolled_back));
}

#[tokio::test]
async fn a_number_completed_by_the_end_of_the_output_is_checked() {
    let engine = engine();
    let schema = json!({"type": "integer", "minimum": 1, "maximum": 99, "not": {"multipleOf": 3}});
    let mut rolled_back = 0;
    for seed in 0..20 {
        let run = generate(&engine, request(schema.clone(), seed)).await.unwrap();
        assert_valid(&schema, &run.text);
        rolled_back += run.finished.usage.rolled_back_tokens;
    }
    assert!(rolled_back > 0);
}

/// Returns everything that a caller receives, except the times.
fn observed(run: &Generated) -> (&str, &[u32], &FinishReason, u32) {
    (&run.text, &run.ids, run.reason(), run.finished.usage.rolled_back_tokens)
}

#[tokio::test]
async fn drafts_other_requests_and_scarce_pages_change_nothing() {
    let requests: Vec<_> = (0..8).map(|seed| request(record(), seed)).collect();
    let alone = engine();
    let mut expected = Vec::new();
    for request in &requests {
        expected.push(generate(&alone, request.clone()).await.unwrap());
    }
    // There are pages for about two of the requests: the others are preempted and resumed later.
    for engine in [eager(), engine_with(512, EngineOptions::default())] {
        let found = together(&engine, &requests).await;
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!(observed(found), observed(expected));
        }
    }
}

#[tokio::test]
async fn tokens_that_span_two_values_are_rolled_back_whole() {
    let limits = DraftLimits { adaptive: false, ..DraftLimits::default() };
    let engines =
        [merging_engine(4096, Speculation::Off), merging_engine(4096, Speculation::PromptLookup(limits))];
    let tags = json!({"type": "array", "items": {"enum": ["a", "b", "aba"]}, "minItems": 3, "maxItems": 3,
                      "uniqueItems": true});
    let schema = json!({"type": "object", "properties": {"tags": tags, "city": tags, "days": tags},
                        "required": ["tags", "city", "days"], "additionalProperties": false});
    let mut rolled_back = 0;
    for seed in 0..12 {
        let expected = generate(&engines[0], request(schema.clone(), seed)).await.unwrap();
        assert_valid(&schema, &expected.text);
        let found = generate(&engines[1], request(schema.clone(), seed)).await.unwrap();
        assert_eq!(observed(&found), observed(&expected));
        rolled_back += expected.finished.usage.rolled_back_tokens;
    }
    assert!(rolled_back > 0);
}

#[tokio::test]
async fn the_cache_holds_only_the_final_output() {
    let engine = engine();
    for seed in 0..6 {
        let first = generate(&engine, request(record(), seed)).await.unwrap();
        let mut next = greedy("", 20);
        next.prompt = request(record(), seed).prompt;
        next.prompt.extend(&first.ids);
        let warm = generate(&engine, next.clone()).await.unwrap();
        assert_eq!(warm.ids, generate(&super::fixture::engine(), next).await.unwrap().ids, "seed {seed}");
    }
}

#[tokio::test]
async fn output_around_an_unchecked_value_is_reported_at_once() {
    let engine = engine();
    let mut stream = engine.generate(request(record(), 3)).unwrap();
    let (mut text, mut counts) = (String::new(), Vec::new());
    while let Some(event) = stream.next().await {
        if let TokenEvent::Token(token) = event.unwrap() {
            text += &token.text;
            counts.push(token.rolled_back);
        }
    }
    // The count grows only with the last token of the held output.
    assert!(counts.is_sorted_by_key(|count| (count.times, count.tokens)), "{counts:?}");
    assert!(counts.last().unwrap().times > 0, "{text}");
    assert_eq!(counts[0], RolledBack::default());
}

#[tokio::test]
async fn a_resumed_generation_repeats_its_rollbacks() {
    let engine = engine();
    let mut rolled_back = 0;
    for seed in 0..4 {
        let request = request(record(), seed);
        let mut stream = engine.generate(request.clone()).unwrap();
        let mut observed = Vec::new();
        let mut finished = None;
        while let Some(event) = stream.next().await {
            match event.unwrap() {
                TokenEvent::Token(token) => observed.push((token.id, token.rolled_back)),
                TokenEvent::Finished(end) => finished = Some(end),
                _ => {}
            }
        }
        let finished = finished.unwrap();
        rolled_back += finished.usage.rolled_back_tokens;
        for known in 0..=observed.len() {
            let resumed = GenerateRequest {
                resume: observed[..known].iter().map(|(id, _)| *id).collect(),
                resume_rolled_back: known.checked_sub(1).map(|last| observed[last].1).unwrap_or_default(),
                ..request.clone()
            };
            let resumed = generate(&engine, resumed).await.unwrap();
            assert_eq!(resumed.ids, finished.tokens, "after {known}");
            assert_eq!(
                resumed.finished.usage.rolled_back_tokens, finished.usage.rolled_back_tokens,
                "after {known}"
            );
        }
    }
    assert!(rolled_back > 0);
}

#[tokio::test]
async fn a_limit_inside_a_value_reports_length_and_the_partial_value() {
    let engine = engine();
    let whole = generate(&engine, request(record(), 1)).await.unwrap();
    for max_tokens in 1..whole.ids.len() {
        let cut = GenerateRequest { max_tokens: Some(max_tokens), ..request(record(), 1) };
        let run = generate(&engine, cut).await.unwrap();
        assert_eq!((run.ids.len(), run.reason()), (max_tokens, &FinishReason::Length), "{}", run.text);
    }
}

/// Returns a schema whose masks always accept what it then refuses.
fn unsatisfiable() -> Value {
    json!({"type": "object", "additionalProperties": false, "required": ["a", "b"], "properties": {
        "a": {"const": "fine"}, "b": {"type": "string", "pattern": "^[ab]{2}$", "not": {"pattern": "a|b"}}}})
}

#[tokio::test]
async fn an_unsatisfiable_schema_is_an_error_with_location_and_reason() {
    let engine = engine();
    match generate(&engine, request(unsatisfiable(), 1)).await {
        Err(EngineError::SchemaUnsatisfied { place, reason, rolled_back }) => {
            assert!(place.contains("/b"), "{place}");
            assert!(reason.contains("`not`"), "{reason}");
            assert!(rolled_back > 0);
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn an_error_follows_the_reported_output_without_the_failed_value() {
    let engine = engine();
    let mut stream = engine.generate(request(unsatisfiable(), 1)).unwrap();
    let mut text = String::new();
    let error = loop {
        match stream.next().await.expect("the stream reports how it ended") {
            Ok(TokenEvent::Token(token)) => text += &token.text,
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert!(matches!(error, EngineError::SchemaUnsatisfied { .. }), "{error}");
    assert!(text.contains("fine") && text.trim_end().ends_with(':'), "{text}");
    assert!(collect(engine.generate(request(unsatisfiable(), 2)).unwrap()).await.is_err());
}

/// Makes the model write large exponents.
fn large_numbers(constraint: Constraint, seed: u64) -> GenerateRequest {
    let mut request = GenerateRequest { constraint: Some(constraint), ..request(json!({}), seed) };
    for (bytes, bias) in [("e", 9.0), ("19", 8.0), (",]}", 8.0), ("-", -20.0)] {
        request.sampling.logit_bias.extend(bytes.bytes().map(|byte| (u32::from(byte), bias)));
    }
    request.sampling.logit_bias.push((EOS, 8.0));
    request
}

fn assert_finite(text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"));
    let all_finite = |value: &Value| value.as_f64().is_none_or(f64::is_finite);
    assert!(value.as_array().map_or_else(|| all_finite(&value), |items| items.iter().all(all_finite)));
}

#[tokio::test]
async fn a_generated_number_is_a_finite_double() {
    let engine = engine();
    let number = json!({"type": "number"});
    let numbers = json!({"type": "array", "items": number, "minItems": 2, "maxItems": 2});
    let at_least = json!({"type": "object", "properties": {"a": {"anyOf": [number, {"type": "null"}]}},
                          "required": ["a"], "additionalProperties": false});
    let mut rolled_back = 0;
    for schema in [number, numbers, at_least] {
        let mut complete = 0;
        for seed in 0..20 {
            let request = large_numbers(Constraint::JsonSchema(schema.clone()), seed);
            let run = generate(&engine, request).await.unwrap();
            if !run.reason().cuts_off() {
                assert_finite(&run.text);
                complete += 1;
            }
            rolled_back += run.finished.usage.rolled_back_tokens;
        }
        assert!(complete > 5, "{complete}");
    }
    assert!(rolled_back > 0, "no number was too large");
}

#[tokio::test]
async fn a_finite_number_equals_the_masked_draws() {
    let engine = engine();
    let schema = Constraint::JsonSchema(json!({"type": "number"}));
    let mut finite = 0;
    for seed in 0..40 {
        let run = generate(&engine, large_numbers(schema.clone(), seed)).await.unwrap();
        // The regular expression makes the same draws under the same mask, without anything to check.
        let regex = Constraint::Regex(
            r"( |\r?\n[ \t]{0,20})?-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?( |\r?\n[ \t]{0,20})?"
                .into(),
        );
        let masked = generate(&engine, large_numbers(regex, seed)).await.unwrap();
        let number = masked.text.trim();
        if run.finished.usage.rolled_back_tokens > 0 {
            assert!(number.parse::<f64>().unwrap().is_infinite(), "{number} was rolled back");
        } else if !masked.reason().cuts_off() {
            finite += 1;
            assert_eq!(run.text.trim(), number, "seed {seed}");
        }
    }
    assert!(finite > 5, "{finite}");
}
