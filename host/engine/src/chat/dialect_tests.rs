//! Tests of whole answers in markups other than Hermes, and of reasoning: what masks bind, what budgets end, and what stays
//! cached.

use serde_json::{Value, json};
use skep_model::{ChatTemplate, SpecialTokens};

use super::dialect::Dialect;
use super::fixture;
use crate::chat::markup::Markup;
use crate::chat::{
    ChatEvent, ChatFinish, ChatMessage, ChatOptions, ChatOutcome, Opening, Reasoning, ToolCall, ToolChoice,
    ToolSpec, Transcript, chat, prompt_text,
};
use crate::{Constraint, Engine, EngineOptions};

const THINK: [&str; 2] = ["<think>", "</think>"];
const KIMI: [&str; 7] = [
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
];

/// A template that shows reasoning only after the last message of the user, and opens it unless it is disabled.
const THINKING_TEMPLATE: &str = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
    {% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n\
    {% if m.role == 'assistant' %}{% set c = m.content.split('</think>')[-1].lstrip('\n') %}\
    {% if loop.index0 > ns.last and '</think>' in m.content %}<think>\n{{ m.content.split('</think>')[0].split('<think>')[-1].strip('\n') }}\n</think>\n\n{% endif %}{{ c }}\
    {% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}{% if tools %}<tool_call>{{ tools | length }}{% endif %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}";

/// A template in the manner of Kimi's.
const KIMI_TEMPLATE: &str = "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}\
    {% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}\
    {% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}\
    <think>{% if loop.index0 > ns.last and m.reasoning_content %}{{ m.reasoning_content }}{% endif %}</think>{{ m.content }}\
    {% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}<|tool_call_argument_begin|>\
    {{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}\
    {% elif m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{{ m.content }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}\
    {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

pub(super) fn engine(specials: &[&str], template: &str, scripts: &[&str]) -> Engine {
    let template = ChatTemplate::new(template, None, None).expect("the template compiles");
    let tokenizer = fixture::tokenizer_with(specials);
    fixture::engine_of(tokenizer, SpecialTokens::Parse, template, scripts, EngineOptions::default())
}

pub(super) fn tools() -> Vec<ToolSpec> {
    let parameters = json!({"type": "object", "properties": {"city": {"type": "string", "maxLength": 12}},
                            "required": ["city"], "additionalProperties": false});
    vec![ToolSpec { name: "weather".into(), description: "The weather.".into(), parameters }]
}

pub(super) fn calls(outcome: &ChatOutcome) -> Vec<(&str, Value)> {
    let read = |call: &ToolCall| serde_json::from_str(&call.arguments).expect("JSON");
    outcome.tool_calls.iter().map(|call| (call.name.as_str(), read(call))).collect()
}

async fn turn(transcript: &mut Transcript, engine: &Engine, options: &ChatOptions) -> ChatOutcome {
    let outcome = transcript.generate(engine, options.clone()).unwrap().outcome().await.unwrap();
    transcript.commit(&outcome);
    outcome
}

pub(super) fn form() -> Constraint {
    Constraint::JsonSchema(
        json!({"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
                                  "additionalProperties": false}),
    )
}

#[tokio::test]
async fn constraints_bind_the_answer_and_not_the_reasoning() {
    let answer = "<think>\nIs { it } so?\n</think>\n\n{\"ok\": true}";
    let call = "<think>\nI look.\n</think>\n\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Rom\"}}\n</tool_call>";
    let options = ChatOptions { output: Some(form()), ..ChatOptions::default() };
    let model = engine(&THINK, THINKING_TEMPLATE, &[answer, call]);
    let outcome = chat(&model, &[ChatMessage::user("so?")], options).unwrap().outcome().await.unwrap();
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("Is { it } so?", "{\"ok\": true}"));
    assert_eq!((outcome.raw.as_str(), outcome.finish), (answer, ChatFinish::Stop));
    let of_reasoning = model.tokenizer().encode("<think>\nIs { it } so?\n</think>", SpecialTokens::Parse);
    let counted = outcome.usage.reasoning_tokens as usize;
    let expected = of_reasoning.unwrap().len();
    assert!((expected..=expected + 2).contains(&counted), "{counted} of {expected}, with the lines after it");
    let options = ChatOptions { tools: tools(), tool_choice: ToolChoice::Required, ..ChatOptions::default() };
    let mut stream = chat(&model, &[ChatMessage::user("Rome?")], options).unwrap();
    let (mut reasoning, mut finished) = (String::new(), None);
    while let Some(event) = stream.next().await {
        match event.unwrap() {
            ChatEvent::Reasoning { delta } => reasoning += &delta,
            ChatEvent::Text { delta, .. } => panic!("no text comes before the call: {delta:?}"),
            ChatEvent::Finished(outcome) => finished = Some(outcome),
            _ => {}
        }
    }
    let outcome = finished.unwrap();
    assert_eq!((reasoning.as_str(), outcome.reasoning.as_str()), ("I look.", "I look."));
    assert_eq!(calls(&outcome), [("weather", json!({"city": "Rom"}))]);
}

#[tokio::test]
async fn a_model_that_would_not_reason_begins_to_where_its_answer_is_bound() {
    let model = engine(&THINK, THINKING_TEMPLATE, &["No thoughts, no form.", "{\"ok\": false}"]);
    let options = ChatOptions { output: Some(form()), max_tokens: Some(40), ..ChatOptions::default() };
    let outcome =
        chat(&model, &[ChatMessage::user("so?")], options.clone()).unwrap().outcome().await.unwrap();
    assert!(outcome.raw.starts_with("<think>"), "{}", outcome.raw);
    assert_eq!(
        (outcome.finish, outcome.text.as_str()),
        (ChatFinish::Length, ""),
        "it cannot end before its answer"
    );
    // Without reasoning the template closes it, and the schema applies from the first token on.
    let reasoning = Reasoning { enabled: Some(false), ..Reasoning::default() };
    let options = ChatOptions { reasoning, ..options };
    let outcome = chat(&model, &[ChatMessage::user("so?")], options).unwrap().outcome().await.unwrap();
    assert_eq!((outcome.raw.as_str(), outcome.reasoning.as_str()), ("{\"ok\": false}", ""));
    assert!(outcome.rendered.ends_with("<think>\n\n</think>\n\n"), "{}", outcome.rendered);
}

#[tokio::test]
async fn a_budget_ends_the_reasoning() {
    let reasoning = |budget| Reasoning { budget: Some(budget), ..Reasoning::default() };
    let long = format!("<think>{}</think>\n\nYes.", "a, b; ".repeat(20));
    for budget in [0, 1, 7, 1000] {
        let model = engine(&THINK, THINKING_TEMPLATE, &[&long]);
        let options =
            ChatOptions { reasoning: reasoning(budget), max_tokens: Some(300), ..ChatOptions::default() };
        let outcome = chat(&model, &[ChatMessage::user("so?")], options).unwrap().outcome().await.unwrap();
        let tokenizer = model.tokenizer();
        let end = outcome
            .tokens
            .iter()
            .position(|id| tokenizer.token_text(*id) == Some("</think>"))
            .expect("an end");
        // One token opens the reasoning.
        assert_eq!(
            end - 1,
            budget.min(
                long.find("</think>")
                    .map_or(0, |at| tokenizer.encode(&long[7..at], SpecialTokens::Literal).unwrap().len())
            ),
            "{}",
            outcome.raw
        );
        assert!(
            outcome.raw[outcome.raw.find("</think>").unwrap()..].starts_with("</think>\n\n"),
            "{}",
            outcome.raw
        );
        assert!(!outcome.text.is_empty() && outcome.finish == ChatFinish::Stop, "{:?}", outcome.raw);
    }
}

#[tokio::test]
async fn kimi_call_ids_follow_its_format_in_calls_and_results() {
    let call = "<think>Look.</think>One moment.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
                {\"city\":\"Rom\"}<|tool_call_end|><|tool_calls_section_end|>";
    let model = engine(&KIMI, KIMI_TEMPLATE, &[call, "<think>Sun.</think>Sunny.", "<think>Hm.</think>Bye."]);
    assert_eq!(Dialect::of_engine(&model).markup.name, "kimi-k2");
    let options = ChatOptions { tools: tools(), ..ChatOptions::default() };
    let mut transcript = Transcript::new();
    transcript.push(ChatMessage::user("Rome <|tool_call_begin|>?"));
    let first = turn(&mut transcript, &model, &options).await;
    assert_eq!((first.reasoning.as_str(), first.text.as_str()), ("Look.", "One moment."));
    assert_eq!(calls(&first), [("weather", json!({"city": "Rom"}))]);
    let begins = model.tokenizer().token_id("<|tool_call_begin|>").unwrap();
    assert!(!first.prompt.contains(&begins), "the text of the user stays text");
    let known = transcript.tokens().to_vec();
    transcript.push(ChatMessage::tool(first.tool_calls[0].id.clone(), "sun"));
    let second = turn(&mut transcript, &model, &options).await;
    // The answer is continued in its own spelling, which the template would write otherwise.
    assert!(second.prompt.starts_with(&known), "{}", second.rendered);
    assert!(second.rendered.contains("{\"city\":\"Rom\"}<|tool_call_end|>"), "{}", second.rendered);
    assert!(second.rendered.contains("## Return of functions.weather:0\nsun"), "{}", second.rendered);
    assert!(second.usage.cached_tokens + 32 > first.usage.prompt_tokens + first.usage.completion_tokens);
    // A new question drops the reasoning of the turns before it. Everything before that stays cached.
    transcript.push(ChatMessage::user("Thanks."));
    let third = turn(&mut transcript, &model, &options).await;
    assert!(
        !third.rendered.contains("Look.") && third.rendered.contains("<think></think>One moment."),
        "{}",
        third.rendered
    );
    assert!(third.prompt.starts_with(&first.prompt), "the prompt of the first answer is still the beginning");
    assert!(
        third.usage.cached_tokens + 16 >= first.usage.prompt_tokens,
        "{:?} after {:?}",
        third.usage,
        first.usage
    );
    assert!(third.usage.cached_tokens < third.usage.prompt_tokens);
    assert_eq!(third.text, "Bye.");
}

#[tokio::test]
async fn calls_of_another_client_are_shown_with_ids_of_the_markup() {
    let model = engine(&KIMI, KIMI_TEMPLATE, &["<think></think>Sunny."]);
    let call = |id: &str, city: &str| ToolCall {
        id: id.into(),
        name: "weather".into(),
        arguments: json!({"city": city}).to_string(),
    };
    let messages = [
        ChatMessage::user("Rome and Bari?"),
        ChatMessage {
            tool_calls: vec![call("toolu_1", "Rom"), call("x", "Bari")],
            ..ChatMessage::assistant("")
        },
        ChatMessage::tool("x", "rain"),
        ChatMessage::tool("toolu_1", "sun"),
    ];
    let options = ChatOptions { tools: tools(), ..ChatOptions::default() };
    let outcome = chat(&model, &messages, options).unwrap().outcome().await.unwrap();
    for part in [
        "functions.weather:0<|tool_call_argument_begin|>{\"city\": \"Rom\"}",
        "functions.weather:1<|tool_call_argument_begin|>",
        "## Return of functions.weather:1\nrain",
        "## Return of functions.weather:0\nsun",
    ] {
        assert!(outcome.rendered.contains(part), "{}", outcome.rendered);
    }
    assert_eq!(outcome.text, "Sunny.");
}

#[test]
fn templates_that_put_texts_together_get_the_arguments_of_calls_as_text() {
    let joined = "{{ '<|tool_call_argument_begin|>' + c.function.arguments + '<|tool_call_end|>' }}";
    let source = KIMI_TEMPLATE
        .replace("<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>", joined);
    let template = ChatTemplate::new(&source, None, None).expect("the template compiles");
    let tokenizer = fixture::tokenizer_with(&KIMI);
    let call = |arguments: &str| ToolCall {
        id: "functions.weather:0".into(),
        name: "weather".into(),
        arguments: arguments.into(),
    };
    let tools = tools();
    for (arguments, written) in [("{\"city\":  \"Rom\"}", "{\"city\":  \"Rom\"}"), ("", "{}")] {
        let messages = [
            ChatMessage::user("Rome?"),
            ChatMessage { tool_calls: vec![call(arguments)], ..ChatMessage::assistant("") },
            ChatMessage::tool("functions.weather:0", "sun"),
        ];
        let opening = Opening { tools: &tools, examples: &[], reasoning: None };
        let text = prompt_text(&template, &tokenizer, &messages, opening).unwrap();
        let expected = format!("<|tool_call_argument_begin|>{written}<|tool_call_end|>");
        assert!(text.contains(&expected), "{text}");
    }
}

#[tokio::test]
async fn a_setting_chooses_the_markup_where_the_template_shows_none() {
    let call =
        ToolCall { id: String::new(), name: "weather".into(), arguments: "{\"city\": \"Rom\"}".into() };
    for name in ["qwen3-coder", "glm-4.5", "deepseek-v3.2", "mistral-v13", "llama3", "deepseek-v3.1"] {
        let markup = Markup::named(name).unwrap();
        let script = markup.assistant("", std::slice::from_ref(&call));
        let options = EngineOptions { markup: Some(markup.name), ..EngineOptions::default() };
        let template = ChatTemplate::chatml_default();
        let model = fixture::engine_of(
            fixture::tokenizer(),
            SpecialTokens::Literal,
            template,
            &[&script, "talk"],
            options,
        );
        assert_eq!(Dialect::of_engine(&model).markup.name, name);
        let options = ChatOptions { tools: tools(), ..ChatOptions::default() };
        let outcome =
            chat(&model, &[ChatMessage::user("Rome?")], options.clone()).unwrap().outcome().await.unwrap();
        assert_eq!(calls(&outcome), [("weather", json!({"city": "Rom"}))], "{name}: {}", outcome.raw);
        assert!(
            outcome.rendered.contains(&markup.assistant(
                "",
                &[ToolCall {
                    name: "NAME".into(),
                    arguments: "{\"ARGUMENT\": \"VALUE\"}".into(),
                    ..call.clone()
                }]
            )),
            "{name}"
        );
        let forced = ChatOptions {
            tool_choice: ToolChoice::Required,
            max_tokens: Some(400),
            parallel_tool_calls: false,
            ..options
        };
        let outcome = chat(&model, &[ChatMessage::user("Bari?")], forced).unwrap().outcome().await.unwrap();
        assert_eq!((outcome.tool_calls.len(), outcome.text.as_str()), (1, ""), "{name}: {}", outcome.raw);
    }
}

#[tokio::test]
async fn values_between_tags_are_constrained_as_far_as_a_mask_can() {
    let parameters = json!({"type": "object", "additionalProperties": false,
        "$defs": {"Color": {"enum": ["red", "blue"]}},
        "properties": {
            "when": {"type": "string", "format": "date"},
            "color": {"anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}]},
            "code": {"type": "string", "pattern": "^(a|b)[0-9]$|^zz$"},
            "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}], "default": null},
            "size": {"enum": ["S", 4]}},
        "required": ["when", "color", "code", "flag", "size"]});
    let valid = json!({"when": "2026-02-28", "color": "blue", "code": "b7", "flag": true, "size": 4});
    let wrong = json!({"when": "tomorrow", "color": "green", "code": "c7", "flag": "perhaps", "size": "XL"});
    let validator = crate::SchemaValidator::compile(&parameters, crate::Dialect::Linear).unwrap();
    let tools = vec![ToolSpec { name: "paint".into(), description: "Paints.".into(), parameters }];
    for name in ["qwen3-coder", "glm-4.5", "glm-4.7", "deepseek-v3.2"] {
        let markup = Markup::named(name).unwrap();
        let script = |arguments: &Value| {
            let arguments = arguments.to_string();
            markup.assistant("", &[ToolCall { id: String::new(), name: "paint".into(), arguments }])
        };
        // The template's own spelling of the schema is used, because it decides what is a string and what is JSON.
        let scripts = [script(&valid), script(&wrong)];
        let options = EngineOptions { markup: Some(markup.name), ..EngineOptions::default() };
        let template = ChatTemplate::chatml_default();
        let scripts: Vec<&str> = scripts.iter().map(String::as_str).collect();
        let model =
            fixture::engine_of(fixture::tokenizer(), SpecialTokens::Literal, template, &scripts, options);
        for (said, question) in [(Some(&valid), "?"), (None, "and now?")] {
            let options = ChatOptions {
                tools: tools.clone(),
                tool_choice: ToolChoice::Required,
                parallel_tool_calls: false,
                max_tokens: Some(600),
                ..ChatOptions::default()
            };
            let outcome = chat(&model, &[ChatMessage::user(question)], options).unwrap().outcome().await;
            let outcome = outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
            let arguments: Value = serde_json::from_str(&outcome.tool_calls[0].arguments).unwrap();
            assert!(validator.check(&arguments).is_ok(), "{name}: {arguments}");
            if let Some(said) = said {
                assert_eq!(&arguments, said, "{name}: the mask changes nothing that is valid");
            }
        }
    }
}

#[tokio::test]
async fn calls_that_look_like_structured_output_are_refused_with_an_alternative() {
    let options = EngineOptions { markup: Some("llama3"), ..EngineOptions::default() };
    let template = ChatTemplate::chatml_default();
    let scripts = ["{\"ok\": true}"; 2];
    let model = fixture::engine_of(fixture::tokenizer(), SpecialTokens::Literal, template, &scripts, options);
    let formed = ChatOptions { tools: tools(), output: Some(form()), ..ChatOptions::default() };
    let ask = |tool_choice: ToolChoice| {
        chat(&model, &[ChatMessage::user("so?")], ChatOptions { tool_choice, ..formed.clone() })
    };
    let error = ask(ToolChoice::Auto).err().expect("it is refused");
    assert_eq!(error.code(), "invalid_request");
    assert!(error.to_string().contains("set the tool choice to none or required"), "{error}");
    let answered = ask(ToolChoice::None).unwrap().outcome().await.unwrap();
    assert_eq!(answered.text, "{\"ok\": true}");
    let called = ChatOptions { tool_choice: ToolChoice::Required, max_tokens: Some(200), ..formed.clone() };
    let called = chat(&model, &[ChatMessage::user("now?")], called).unwrap().outcome().await.unwrap();
    assert_eq!(called.tool_calls.len(), 1, "{}", called.raw);
}

#[tokio::test]
async fn harmony_messages_become_reasoning_text_and_calls() {
    let specials =
        ["<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>"];
    let template = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|start|>{{ m.role }}{% if m.role == 'assistant' %}\
        {% if m.tool_calls %} to=functions.{{ m.tool_calls[0].function.name }}<|channel|>commentary json<|message|>{{ m.tool_calls[0].function.arguments | tojson }}<|call|>\
        {% else %}<|channel|>final<|message|>{{ m.content }}<|end|>{% endif %}{% else %}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}\
        {% if add_generation_prompt %}<|start|>assistant{% endif %}";
    let think = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant";
    let final_text = format!("{think}<|channel|>final<|message|>{{\"ok\": true}}");
    let call = format!(
        "{think}<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{{\"city\": \"Rom\"}}"
    );
    let model = engine(&specials, template, &[&final_text, &call, &final_text]);
    assert_eq!(Dialect::of_engine(&model).markup.name, "harmony");
    let messages = [ChatMessage::user("so?")];
    let formed = ChatOptions { output: Some(form()), ..ChatOptions::default() };
    let outcome = chat(&model, &messages, formed).unwrap().outcome().await.unwrap();
    assert_eq!(
        (outcome.reasoning.as_str(), outcome.text.as_str()),
        ("Hm {.", "{\"ok\": true}"),
        "{}",
        outcome.raw
    );
    let calling = ChatOptions { tools: tools(), tool_choice: ToolChoice::Required, ..ChatOptions::default() };
    let outcome = chat(&model, &messages, calling.clone()).unwrap().outcome().await.unwrap();
    assert_eq!(calls(&outcome), [("weather", json!({"city": "Rom"}))], "{}", outcome.raw);
    assert_eq!((outcome.reasoning.as_str(), outcome.text.as_str()), ("Hm {.", ""));
    let off = Reasoning { enabled: Some(false), ..Reasoning::default() };
    let none = Reasoning { budget: Some(0), ..Reasoning::default() };
    for reasoning in [off, none] {
        let model = engine(&specials, template, &[final_text.as_str(); 2]);
        let options = ChatOptions { reasoning, max_tokens: Some(60), ..ChatOptions::default() };
        let formed = ChatOptions { output: Some(form()), ..options.clone() };
        for options in [options, formed] {
            let is_formed = options.output.is_some();
            let messages = [ChatMessage::user(if is_formed { "a" } else { "b" })];
            let outcome = chat(&model, &messages, options).unwrap().outcome().await.unwrap();
            assert_eq!(outcome.reasoning, "", "{}", outcome.raw);
            assert!(outcome.raw.starts_with("<|channel|>final<|message|>"), "{}", outcome.raw);
            // The script reasons, and has nothing to say in the channel that it was made to begin.
            assert_eq!(outcome.text.is_empty(), !is_formed, "{}", outcome.raw);
        }
    }
    let free = ChatOptions { tool_choice: ToolChoice::Auto, ..calling };
    let outcome = chat(&model, &[ChatMessage::user("and now?")], free).unwrap().outcome().await.unwrap();
    assert_eq!(
        (outcome.reasoning.as_str(), outcome.text.as_str()),
        ("Hm {.", "{\"ok\": true}"),
        "{}",
        outcome.raw
    );
}

#[tokio::test]
async fn a_call_ends_a_reasoning_that_has_no_end() {
    let specials = ["<think>", "</think>", "<tool_call>", "</tool_call>"];
    for name in ["hermes", "qwen3-coder", "glm-4.5"] {
        let markup = Markup::named(name).unwrap();
        let call =
            ToolCall { id: String::new(), name: "weather".into(), arguments: "{\"city\": \"Rom\"}".into() };
        let interrupted = format!("<think>Look.\n{}", markup.assistant("", std::slice::from_ref(&call)));
        let mentioned = "<think>A <tool_call> it is not.</think>\n\nYes.";
        let template = ChatTemplate::new(THINKING_TEMPLATE, None, None).expect("the template compiles");
        let model = fixture::engine_of(
            fixture::tokenizer_with(&specials),
            SpecialTokens::Parse,
            template,
            &[&interrupted, mentioned, mentioned],
            EngineOptions { markup: Some(markup.name), ..EngineOptions::default() },
        );
        let options = ChatOptions { tools: tools(), max_tokens: Some(200), ..ChatOptions::default() };
        let outcome =
            chat(&model, &[ChatMessage::user("Rome?")], options.clone()).unwrap().outcome().await.unwrap();
        assert_eq!(outcome.reasoning, "Look.", "{name}: {}", outcome.raw);
        assert_eq!(calls(&outcome), [("weather", json!({"city": "Rom"}))], "{name}: {}", outcome.raw);
        // An answer that may not be a call has no call to be interrupted by.
        let silent = ChatOptions { tool_choice: ToolChoice::None, ..options };
        for (question, options) in [("so?", ChatOptions::default()), ("and so?", silent)] {
            let outcome =
                chat(&model, &[ChatMessage::user(question)], options).unwrap().outcome().await.unwrap();
            assert_eq!(
                (outcome.reasoning.as_str(), outcome.text.as_str()),
                ("A <tool_call> it is not.", "Yes."),
                "{name}: {}",
                outcome.raw
            );
        }
    }
}

#[test]
fn a_template_that_declares_types_gets_them_and_json_where_they_cannot_say_it() {
    let template = KIMI_TEMPLATE.replace(
        "{% if tools %}",
        "{% if tools_ts_str %}<|im_start|>tools\n{{ tools_ts_str }}<|im_end|>\n{% elif tools %}",
    );
    let template = ChatTemplate::new(&template, None, None).expect("the template compiles");
    let tokenizer = fixture::tokenizer_with(&[]);
    let prompt = |tools: &[ToolSpec]| {
        let opening = Opening { tools, examples: &[], reasoning: None };
        prompt_text(&template, &tokenizer, &[ChatMessage::user("Rome?")], opening).unwrap()
    };
    let declared = prompt(&tools());
    let expected = "# Tools\n\n## functions\nnamespace functions {\n// The weather.\ntype weather = (_: {\n  // maxLength: 12\n  \
                    city: string,\n  [k: string]: never\n}) => any;\n}\n";
    assert!(declared.contains(expected), "{declared}");
    let parameters = json!({"type": "object", "properties": {"b": {"allOf": []}, "a": {"type": "string"}}});
    let spec = ToolSpec { name: "odd".into(), description: String::new(), parameters };
    let declared = prompt(&[spec]);
    assert!(!declared.contains("namespace") && declared.contains("\"properties\""), "{declared}");
    let place = |text: &str| declared.find(text).unwrap();
    assert!(place("\"a\"") < place("\"b\""), "keys are sorted: {declared}");
}
