//! The reasoning of a model that computes: a budget ends it at the same token each time, whatever the model would write.

use crate::{durability::tiny_model, harness::Host, upstreams::options};
use serde_json::{Value, json};
use std::fs;

/// A template that opens the reasoning, as those of models do that always reason.
const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}{# </think> #}";
const MAX_TOKENS: u64 = 64;

/// Starts a host with a tiny model of random weights, whose vocabulary has the tags of reasoning. Returns it with the token
/// that ends the reasoning.
fn thinking_host() -> (tempfile::TempDir, Host, u64) {
    let model = tempfile::tempdir().unwrap();
    tiny_model(model.path());
    let path = model.path().join("tokenizer.json");
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    let first = tokenizer["model"]["vocab"].as_object().unwrap().len() as u64;
    for (id, tag) in [(first, "<think>"), (first + 1, "</think>")] {
        let mut token = tokenizer["added_tokens"][0].clone();
        (token["id"], token["content"]) = (id.into(), tag.into());
        tokenizer["added_tokens"].as_array_mut().unwrap().push(token);
    }
    fs::write(path, tokenizer.to_string()).unwrap();
    fs::write(model.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let mut options = options("");
    options.model = model.path().to_str().unwrap().to_owned();
    (model, Host::start_with(options), first + 1)
}

#[tokio::test]
async fn a_budget_ends_the_reasoning_of_a_model_that_would_go_on() {
    let (_model, host, end) = thinking_host();
    let answer = async |more: Value| {
        // The model itself never ends its reasoning.
        let mut body = json!({"messages": [{"role": "user", "content": "Why?"}], "max_tokens": MAX_TOKENS, "seed": 7,
                              "temperature": 1, "ignore_eos": true, "logit_bias": {end.to_string(): -100}});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = host.ok("/v1/chat/completions", body).await;
        let usage = &answer["usage"];
        let count = |value: &Value| value.as_u64().unwrap_or_default();
        let tokens = count(&usage["completion_tokens"]);
        let reasoning = count(&usage["completion_tokens_details"]["reasoning_tokens"]);
        let message = answer["choices"][0]["message"].clone();
        let text = |key: &str| message[key].as_str().unwrap_or_default().to_owned();
        (tokens, reasoning, text("reasoning_content"), text("content"))
    };
    let (tokens, reasoning, thought, said) = answer(json!({})).await;
    assert_eq!((tokens, reasoning, said.as_str()), (MAX_TOKENS, MAX_TOKENS, ""), "without a budget");
    let mut ends = Vec::new();
    for budget in [1, 8, 32] {
        let thinking = json!({"thinking": {"type": "enabled", "budget_tokens": budget}});
        let (tokens, reasoning, part, said) = answer(thinking.clone()).await;
        // The end of the reasoning and the white space after it are a few tokens more.
        assert_eq!(tokens, MAX_TOKENS, "{budget}");
        assert!((budget + 1..budget + 9).contains(&reasoning), "{budget}: {reasoning}: {part:?}, {said:?}");
        assert!(
            thought.starts_with(part.trim_end()) && !said.is_empty(),
            "{budget}: {part:?} of {thought:?}"
        );
        assert_eq!(answer(thinking).await, (tokens, reasoning, part.clone(), said.clone()), "{budget}");
        ends.push((part.len(), said.len()));
    }
    assert!(ends.is_sorted_by_key(|(part, _)| *part), "{ends:?}");
    let (tokens, reasoning, part, said) = answer(json!({"thinking": {"type": "disabled"}})).await;
    assert_eq!((tokens, reasoning < 9, part.as_str()), (MAX_TOKENS, true, ""), "{reasoning}");
    assert!(!said.is_empty());
    eprintln!(
        "characters of reasoning and answer with budgets of 1, 8 and 32 tokens: {ends:?}; without: {}",
        thought.len()
    );
}
