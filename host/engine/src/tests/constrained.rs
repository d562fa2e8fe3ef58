//! Tests of constrained output: it always fits, forced tokens cost no sampling, and a cut is visible.

use serde_json::{Value, json};
use skep_model::Sampling;

use super::fixture::{EOS, engine, generate, greedy};
use crate::{Constraint, FinishReason, GenerateRequest};

fn constrained(constraint: Constraint, seed: u64) -> GenerateRequest {
    let mut request = greedy("output: ", 300);
    request.ignore_eos = false;
    request.sampling = Sampling::default();
    request.seed = Some(seed);
    request.constraint = Some(constraint);
    request
}

#[tokio::test]
async fn output_follows_the_schema_and_its_property_order() {
    let engine = engine();
    let schema = json!({
        "type": "object",
        "properties": {
            "city": {"type": "string", "maxLength": 8, "pattern": "^[a-z]*$"},
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "units": {"enum": ["metric", "imperial"]},
        },
        "required": ["city", "days", "units"],
        "additionalProperties": false,
    });
    for seed in 0..10 {
        let run = generate(&engine, constrained(Constraint::JsonSchema(schema.clone()), seed)).await.unwrap();
        let value: Value = serde_json::from_str(&run.text).expect("the text is JSON");
        assert!((1.0..=14.0).contains(&value["days"].as_f64().unwrap()), "{}", run.text);
        assert!(["metric", "imperial"].contains(&value["units"].as_str().unwrap()));
        let keys: Vec<&String> = value.as_object().unwrap().keys().collect();
        assert_eq!(keys, ["city", "days", "units"], "{}", run.text);
        assert!(matches!(run.reason(), FinishReason::ConstraintDone | FinishReason::Eos));
    }
}

#[tokio::test]
async fn output_without_choices_needs_no_sampling() {
    let run =
        generate(&engine(), constrained(Constraint::Regex("\\{\"a\": \\[1, null\\]\\}".to_string()), 0))
            .await;
    let run = run.unwrap();
    assert_eq!(run.text, "{\"a\": [1, null]}");
    assert_eq!(*run.reason(), FinishReason::ConstraintDone);
    assert_eq!(run.finished.usage.forced_tokens as usize, run.ids.len());
}

#[tokio::test]
async fn regular_expressions_grammars_and_free_objects_hold() {
    let engine = engine();
    let date = generate(&engine, constrained(Constraint::Regex("20[0-9]{2}-[01][0-9]".to_string()), 3))
        .await
        .unwrap();
    assert_eq!((date.text.len(), &date.text[..2], &date.text[4..5]), (7, "20", "-"));
    let grammar = "start: \"yes\" | \"no\" \" because \" REASON\nREASON: /[a-z]{3,9}/";
    let answer = generate(&engine, constrained(Constraint::Lark(grammar.to_string()), 4)).await.unwrap();
    assert!(answer.text == "yes" || answer.text.starts_with("no because "), "{}", answer.text);
    for seed in 0..5 {
        let run = generate(&engine, constrained(Constraint::JsonObject, seed)).await.unwrap();
        match run.reason() {
            FinishReason::Length => assert!(run.text.trim_start().starts_with('{')),
            _ => assert!(serde_json::from_str::<Value>(&run.text).unwrap().is_object(), "{}", run.text),
        }
    }
}

#[tokio::test]
async fn a_limit_cuts_constrained_output_visibly() {
    let mut request = constrained(Constraint::Regex("[a-z]{50}".to_string()), 1);
    request.max_tokens = Some(10);
    let run = generate(&engine(), request).await.unwrap();
    assert_eq!((run.reason(), run.ids.len()), (&FinishReason::Length, 10));
}

#[tokio::test]
async fn a_limit_also_cuts_forced_tokens() {
    let mut request = constrained(Constraint::Regex("the same text every time".to_string()), 1);
    request.max_tokens = Some(8);
    let run = generate(&engine(), request).await.unwrap();
    assert_eq!((run.text.as_str(), run.reason()), ("the same", &FinishReason::Length));
}

#[tokio::test]
async fn the_end_token_may_end_output_that_could_continue() {
    let engine = engine();
    let mut request = constrained(Constraint::Regex("a{1,200}".to_string()), 1);
    request.sampling.logit_bias = vec![(EOS, 100.0)];
    let run = generate(&engine, request.clone()).await.unwrap();
    assert_eq!((run.text.as_str(), run.reason()), ("a", &FinishReason::Eos));
    request.ignore_eos = true;
    let run = generate(&engine, request).await.unwrap();
    assert_eq!((run.text.len(), run.reason()), (200, &FinishReason::ConstraintDone));
}

#[tokio::test]
async fn a_constraint_holds_beside_stop_strings_and_scores() {
    let engine = engine();
    let mut request = constrained(Constraint::JsonSchema(json!({"const": {"key": "value"}})), 1);
    request.stop = vec!["val".to_string()];
    let run = generate(&engine, request).await.unwrap();
    assert_eq!(without_white_space(&run.text), "{\"key\":\"");
    assert_eq!(run.reason(), &FinishReason::Stop("val".to_string()));
    let mut request = constrained(Constraint::JsonSchema(json!({"const": {"key": "value"}})), 1);
    request.prompt_logprobs = Some(0);
    let run = generate(&engine, request).await.unwrap();
    assert_eq!(without_white_space(&run.text), "{\"key\":\"value\"}");
    assert_eq!(run.prompt_logprobs.unwrap().len(), "output: ".len());
}

fn without_white_space(text: &str) -> String {
    text.split_whitespace().collect()
}
