//! The default model against exact float32 logits of the same weights, through the public routes.

use crate::harness::{model_path, repository, shared};
use serde_json::{Value, json};
use skep_model::{Checkpoint, SpecialTokens};

/// Rounding activations to int8 costs 0.07; a wrong layer, scale or position costs far more.
const MEAN_ABSOLUTE_ERROR: f64 = 0.09;
const MEAN_NLL_RELATIVE_ERROR: f64 = 0.01;

struct Case {
    text: String,
    ids: Vec<u32>,
    logprobs: Vec<f64>,
    mean_nll: f64,
    next_top: Vec<(u32, f64)>,
}

#[test]
fn token_ids_match_the_reference() {
    let checkpoint = Checkpoint::open(model_path()).unwrap();
    let tokenizer = checkpoint.tokenizer().unwrap().expect("the file contains a tokenizer");
    for case in cases() {
        assert_eq!(tokenizer.encode(&case.text, SpecialTokens::Parse).unwrap(), case.ids, "{:?}", case.text);
        assert_eq!(tokenizer.decode(&case.ids, false), case.text);
        let literal = tokenizer.encode(&case.text, SpecialTokens::Literal).unwrap();
        assert!(literal.iter().all(|id| !tokenizer.is_special(*id)), "{:?}", case.text);
        assert_eq!(tokenizer.decode(&literal, true), case.text);
    }
}

#[tokio::test]
async fn log_probabilities_match_the_reference() {
    let mut errors = Vec::new();
    let (mut our_nll, mut exact_nll) = (0.0, 0.0);
    for case in cases() {
        let request = json!({"prompt": case.ids, "max_tokens": 1, "temperature": 0, "echo": true, "logprobs": 8,
            "ignore_eos": true});
        let answer = shared().ok("/v1/completions", request).await;
        let logprobs = &answer["choices"][0]["logprobs"];
        let ours = logprobs["token_logprobs"].as_array().unwrap_or_else(|| panic!("{answer}"));
        assert_eq!(ours.len(), case.ids.len() + 1, "one per prompt token and one for the generated token");
        assert!(ours[0].is_null(), "the first token has no predecessor");
        let ours: Vec<f64> = ours[1..].iter().map(|value| value.as_f64().unwrap()).collect();
        let prompt = &ours[..case.logprobs.len()];
        errors.extend(prompt.iter().zip(&case.logprobs).map(|(ours, exact)| (ours - exact).abs()));
        our_nll -= prompt.iter().sum::<f64>() / prompt.len() as f64;
        exact_nll += case.mean_nll;
        // The generated token is the most likely one, unless the exact gap is within the rounding error.
        let (first, second) = (case.next_top[0], case.next_top[1]);
        if first.1 - second.1 > 4.0 * MEAN_ABSOLUTE_ERROR {
            errors.push((ours[case.logprobs.len()] - first.1).abs());
        }
    }
    let mean = errors.iter().sum::<f64>() / errors.len() as f64;
    println!("mean |difference| of {} log-probabilities: {mean:.4}", errors.len());
    let relative = (our_nll - exact_nll).abs() / exact_nll;
    println!("mean NLL differs by {:.2} %", 100.0 * relative);
    assert!(relative <= MEAN_NLL_RELATIVE_ERROR, "NLL {our_nll} against {exact_nll}");
    assert!(errors.len() > 100 && mean <= MEAN_ABSOLUTE_ERROR, "mean |difference| is {mean}");
}

fn cases() -> Vec<Case> {
    let path = repository().join("tests/fixtures/smollm2-135m-q4_1.json");
    let values: Vec<Value> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let floats = |value: &Value| value.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    let id = |value: &Value| value.as_u64().unwrap() as u32;
    values
        .iter()
        .map(|value| Case {
            text: value["text"].as_str().unwrap().to_owned(),
            ids: value["ids"].as_array().unwrap().iter().map(id).collect(),
            logprobs: floats(&value["logprobs"]),
            mean_nll: value["mean_nll"].as_f64().unwrap(),
            next_top: value["next_top"]
                .as_array()
                .unwrap()
                .iter()
                .map(|v| (id(&v[0]), v[1].as_f64().unwrap()))
                .collect(),
        })
        .collect()
}
