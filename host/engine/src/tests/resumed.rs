//! Tests of a generation that was cut off and is requested again with the output it had produced: it finishes
//! as if it had not been interrupted.

use serde_json::json;
use skep_model::Sampling;

use super::fixture::{engine, generate, greedy};
use crate::{Constraint, EngineError, GenerateRequest};

/// Returns every kind of request whose next token depends on more than the tokens before it.
fn requests() -> Vec<GenerateRequest> {
    let drawn = GenerateRequest {
        sampling: Sampling { repetition_penalty: 1.3, frequency_penalty: 0.5, ..Sampling::default() },
        seed: Some(11),
        ..greedy("once upon a time", 40)
    };
    let schema = json!({
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"}, "days": {"enum": [1, 20, 300]}},
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    let constrained = GenerateRequest {
        constraint: Some(Constraint::JsonSchema(schema)),
        ignore_eos: false,
        max_tokens: Some(200),
        ..drawn.clone()
    };
    let stopped = GenerateRequest { stop: vec!["e".into(), "0a".into()], ..drawn.clone() };
    vec![greedy("once upon a time", 40), drawn, constrained, stopped]
}

#[tokio::test]
async fn a_resumed_generation_continues_with_the_next_draw() {
    let engine = engine();
    for request in requests() {
        let whole = generate(&engine, request.clone()).await.unwrap();
        for known in 0..=whole.ids.len() {
            let resume = whole.ids[..known].to_vec();
            let resumed = generate(&engine, GenerateRequest { resume, ..request.clone() }).await.unwrap();
            assert_eq!(resumed.ids, whole.ids, "after {known} tokens of {:?}", whole.text);
            assert_eq!((&resumed.text, resumed.reason()), (&whole.text, whole.reason()));
            assert_eq!(resumed.finished.usage.forced_tokens, whole.finished.usage.forced_tokens);
        }
    }
}

#[tokio::test]
async fn resuming_from_impossible_output_is_refused() {
    let engine = engine();
    let schema = json!({"const": {"a": 1}});
    let constrained = GenerateRequest {
        constraint: Some(Constraint::JsonSchema(schema)),
        resume: vec![u32::from(b'x')],
        ..greedy("output: ", 40)
    };
    let error = generate(&engine, constrained).await.unwrap_err();
    assert!(matches!(error, EngineError::Failed(_)), "{error}");
    for (resume, max_tokens) in [(vec![u32::MAX], 40), (vec![65; 3], 2)] {
        let error =
            generate(&engine, GenerateRequest { resume, ..greedy("x", max_tokens) }).await.unwrap_err();
        assert!(
            matches!(&error, EngineError::InvalidRequest { parameter, .. } if parameter == "resume"),
            "{error}"
        );
    }
}
