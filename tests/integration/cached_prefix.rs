//! The prefix of a conversation that stays cached with published templates, which drop the reasoning of earlier turns. The
//! model is a script; the engine, the templates and their renderings are real.

#[path = "../fixtures/scripted_model.rs"]
mod scripted_model;

use crate::chat_templates::templates;
use serde_json::json;
use skep_engine::{
    Engine, EngineOptions,
    chat::{ChatMessage, ChatOptions, ToolSpec, Transcript},
};
use skep_model::{ChatTemplate, SpecialTokens};

/// A template with the tokens of its markup, and an answer that reasons and calls.
struct Family {
    template: &'static str,
    specials: &'static [&'static str],
    call: &'static str,
}

const FAMILIES: [Family; 2] = [
    Family {
        template: "Qwen-Qwen3-0.6B.jinja",
        // The tags around reasoning are no special tokens in this family.
        specials: &["<tool_call>", "</tool_call>"],
        call: "<think>\nI look.\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}}\n</tool_call>",
    },
    Family {
        template: "Kimi-K2-Thinking.jinja",
        specials: &[
            "<think>",
            "</think>",
            "<|tool_calls_section_begin|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
            "<|tool_calls_section_end|>",
        ],
        call: "<think>I look.</think><|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
               {\"city\": \"Rom\"}<|tool_call_end|><|tool_calls_section_end|>",
    },
];

#[tokio::test]
async fn the_prefix_before_dropped_reasoning_stays_cached_with_published_templates() {
    let Some(templates) = templates() else { return };
    let parameters =
        json!({"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]});
    let tool = ToolSpec { name: "weather".into(), description: "The weather.".into(), parameters };
    let options = ChatOptions { tools: vec![tool], ..ChatOptions::default() };
    eprintln!("template                       answer  prompt  cached");
    for Family { template, specials, call } in FAMILIES {
        let source = std::fs::read_to_string(templates.join(template)).unwrap();
        let compiled = ChatTemplate::new(&source, None, None).unwrap();
        let lines = if template.starts_with("Qwen") { "\n\n" } else { "" };
        let [sunny, bye] = ["Sunny.", "Goodbye."].map(|text| format!("<think>\nSo.\n</think>{lines}{text}"));
        let tokenizer = scripted_model::tokenizer(specials);
        let model = scripted_model::model(tokenizer, SpecialTokens::Parse, compiled, &[call, &sunny, &bye]);
        let engine = Engine::start(model, EngineOptions::default()).unwrap();
        let mut transcript = Transcript::new();
        transcript.push(ChatMessage::user("What is the weather in Rome?"));
        let mut used = Vec::new();
        for answer in 0..3 {
            let outcome = transcript.generate(&engine, options.clone()).unwrap().outcome().await.unwrap();
            transcript.commit(&outcome);
            let usage = outcome.usage;
            eprintln!("{template:30} {answer:6}  {:6}  {:6}", usage.prompt_tokens, usage.cached_tokens);
            match answer {
                0 => transcript.push(ChatMessage::tool(outcome.tool_calls[0].id.clone(), "sun")),
                1 => transcript.push(ChatMessage::user("Thanks.")),
                _ => assert!(!outcome.rendered.contains("I look."), "{}", outcome.rendered),
            }
            used.push(usage);
        }
        // Pages have 16 tokens, and the last token of a prompt is always computed.
        let slack = 32;
        let [first, second, third] = [used[0], used[1], used[2]];
        assert!(
            second.cached_tokens + slack > first.prompt_tokens + first.completion_tokens,
            "{template}: nothing is dropped within a turn: {second:?} after {first:?}"
        );
        assert!(third.cached_tokens + slack >= first.prompt_tokens, "{template}: {third:?} after {first:?}");
        assert!(third.cached_tokens < third.prompt_tokens, "{template}: {third:?}");
    }
}
