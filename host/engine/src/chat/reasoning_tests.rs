//! Tests of reasoning between Mistral's tags and in the channels of harmony: what is bound, and what a budget ends.

use serde_json::json;
use skep_model::SpecialTokens;

use super::dialect::Dialect;
use super::dialect_tests::{calls, engine, form, tools};
use crate::chat::{ChatFinish, ChatMessage, ChatOptions, Reasoning, ToolChoice, chat};

const MISTRAL: [&str; 4] = ["[THINK]", "[/THINK]", "[TOOL_CALLS]", "[ARGS]"];
/// A template in the manner of Ministral's.
const MISTRAL_TEMPLATE: &str = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}{{ m.content }}\
    {% if m.tool_calls %}{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}{% endif %}\
    <|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

const HARMONY: [&str; 7] =
    ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"];
/// A template in the manner of that of gpt-oss.
const HARMONY_TEMPLATE: &str = "{% if tools %}commentary{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}\
    {% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ m.content }}<|end|>{% endfor %}\
    {% if add_generation_prompt %}<|start|>assistant{% endif %}";

#[tokio::test]
async fn reasoning_between_the_tags_of_mistral_is_read_and_free() {
    let formed = "[THINK]Is { it } so?[/THINK]{\"ok\": true}";
    let call = "[THINK]I look.[/THINK][TOOL_CALLS]weather[ARGS]{\"city\": \"Rom\"}";
    let model = engine(&MISTRAL, MISTRAL_TEMPLATE, &[formed, call]);
    assert_eq!(Dialect::of_engine(&model).markup.name, "mistral-v13");
    let messages = [ChatMessage::user("so?")];
    let options = ChatOptions { output: Some(form()), ..ChatOptions::default() };
    let outcome = chat(&model, &messages, options).unwrap().outcome().await.unwrap();
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("Is { it } so?", "{\"ok\": true}"));
    assert_eq!((outcome.raw.as_str(), outcome.finish), (formed, ChatFinish::Stop));
    let options = ChatOptions { tools: tools(), tool_choice: ToolChoice::Required, ..ChatOptions::default() };
    let outcome = chat(&model, &messages, options).unwrap().outcome().await.unwrap();
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("I look.", ""));
    assert_eq!(calls(&outcome), [("weather", json!({"city": "Rom"}))], "{}", outcome.raw);
}

#[tokio::test]
async fn a_budget_ends_the_reasoning_of_mistral_and_of_harmony() {
    let thoughts = "a, b; ".repeat(20);
    let mistral = format!("[THINK]{thoughts}[/THINK]Yes.");
    let harmony = format!(
        "<|channel|>analysis<|message|>{thoughts}<|end|><|start|>assistant<|channel|>final<|message|>Yes."
    );
    for (specials, template, script, end, after) in [
        (&MISTRAL[..], MISTRAL_TEMPLATE, &mistral, "[/THINK]", ""),
        (&HARMONY[..], HARMONY_TEMPLATE, &harmony, "<|end|>", "<|start|>assistant"),
    ] {
        for budget in [1, 7, 1000] {
            let model = engine(specials, template, &[script.as_str()]);
            let reasoning = Reasoning { budget: Some(budget), ..Reasoning::default() };
            let options = ChatOptions { reasoning, max_tokens: Some(300), ..ChatOptions::default() };
            let outcome =
                chat(&model, &[ChatMessage::user("so?")], options).unwrap().outcome().await.unwrap();
            let tokenizer = model.tokenizer();
            let count = |text: &str| tokenizer.encode(text, SpecialTokens::Parse).unwrap().len();
            let is_end = |id: &u32| tokenizer.token_text(*id) == Some(end);
            let ended = outcome.tokens.iter().position(is_end).expect("an end");
            let opening = count(&script[..script.find(&thoughts).unwrap()]);
            assert_eq!(ended - opening, budget.min(count(&thoughts)), "{end}: {}", outcome.raw);
            let at = outcome.raw.find(end).unwrap();
            assert!(outcome.raw[at..].starts_with(&format!("{end}{after}")), "{}", outcome.raw);
            assert!(thoughts.starts_with(outcome.reasoning.trim_end()), "{}", outcome.raw);
            assert!(outcome.text.ends_with("Yes."), "{}", outcome.raw);
            assert_eq!(outcome.finish, ChatFinish::Stop, "{}", outcome.raw);
        }
    }
}
