//! Tests of the readers of all markups: what the grammar allows and what templates write is found, for every chunking, and
//! the known mistakes of models lose no text.

use std::sync::Arc;

use serde_json::{Value, json};
use skep_model::{ChatTemplate, Tokenizer};

use super::*;
use crate::chat::dialect::Dialect;
use crate::chat::markup::Markup;
use crate::chat::options::ChatOptions;
use crate::chat::tool_grammar;
use crate::chat::{ToolCall, ToolChoice};
use crate::constraint::{ConstraintCompiler, Spelling};
use crate::tests::{draws::Draws, fixture, schema_fuzz::walk};

pub(super) const NAMES: [&str; 14] = [
    "hermes",
    "kimi-k2",
    "llama3",
    "mistral-v3",
    "mistral-v11",
    "mistral-v13",
    "deepseek-v3",
    "deepseek-v3.1",
    "deepseek-v3.2",
    "deepseek-v4",
    "qwen3-coder",
    "glm-4.5",
    "glm-4.7",
    "harmony",
];

fn tool(name: &str, parameters: Value) -> ToolSpec {
    ToolSpec { name: name.into(), description: "…".into(), parameters }
}

pub(super) fn tools() -> Vec<ToolSpec> {
    vec![
        tool(
            "get.weather-now",
            json!({"type": "object", "properties": {
                "city": {"type": "string", "maxLength": 12}, "days": {"type": "integer", "minimum": 0, "maximum": 9},
                "unit": {"enum": ["celsius", "kelvin"]}, "exact": {"type": "boolean"}},
                "required": ["city"], "additionalProperties": false}),
        ),
        tool("get", json!({"type": "object", "properties": {}, "additionalProperties": false})),
        tool(
            "plot",
            json!({"type": "object", "properties": {
                "points": {"type": "array", "items": {"type": "integer", "maximum": 9}, "maxItems": 3},
                "style": {"$ref": "#/$defs/style"}, "title": {"type": ["string", "null"], "maxLength": 6}},
                "required": ["points", "style"], "additionalProperties": false,
                "$defs": {"style": {"type": "object", "properties": {"wide": {"type": "boolean"}},
                                    "required": ["wide"], "additionalProperties": false}}}),
        ),
    ]
}

/// The joined events of an answer: reasoning, text, and name and arguments of its calls.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Read {
    pub(super) reasoning: String,
    pub(super) text: String,
    pub(super) begun: Vec<(String, String)>,
    pub(super) calls: Vec<(String, String)>,
    /// Whether the text ended within a call.
    pub(super) in_call: bool,
}

pub(super) fn read(name: &str, pieces: &[&str], cut: bool) -> Read {
    let mut reader = AnswerReader::for_markup(name, Some(("<think>", "</think>")), &tools());
    let mut events: Vec<ParsedEvent> = pieces.iter().flat_map(|piece| reader.push(piece)).collect();
    let mut read = Read { in_call: reader.is_in_call(), ..Read::default() };
    events.extend(reader.finish(cut));
    for event in events {
        match event {
            ParsedEvent::Reasoning(delta) => read.reasoning += &delta,
            ParsedEvent::Text(delta) => read.text += &delta,
            ParsedEvent::CallStarted { index, name, .. } => {
                assert_eq!(index, read.begun.len());
                read.begun.push((name, String::new()));
            }
            ParsedEvent::Arguments { index, delta } => read.begun[index].1 += &delta,
            ParsedEvent::CallFinished { index, call } => {
                assert_eq!(read.begun[index], (call.name.clone(), call.arguments.clone()), "{name}");
                read.calls.push((call.name, call.arguments));
            }
        }
    }
    read
}

/// Reads a text in many chunkings, all of which must give the same.
fn read_in_pieces(name: &str, text: &str, cut: bool) -> Read {
    let whole = read(name, &[text], cut);
    let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    for &at in &places {
        assert_eq!(read(name, &[&text[..at], &text[at..]], cut), whole, "{name}: {text:?} at {at}");
    }
    let single: Vec<String> = text.chars().map(String::from).collect();
    let single: Vec<&str> = single.iter().map(String::as_str).collect();
    assert_eq!(read(name, &single, cut), whole, "{name}: {text:?} in characters");
    whole
}

fn check(name: &str, text: &str, said: &str, calls: &[(&str, Value)]) {
    let read = read_in_pieces(name, text, false);
    assert_eq!(read.text, said, "{name}: {text:?}");
    let found: Vec<(&str, Value)> = read
        .calls
        .iter()
        .map(|(name, arguments)| (name.as_str(), serde_json::from_str(arguments).expect("JSON")))
        .collect();
    assert_eq!(found, calls, "{name}: {text:?}");
}

fn dialect(name: &str, tokenizer: &Tokenizer) -> Dialect {
    let markup = Markup::named(name).expect("known");
    Dialect::of(&ChatTemplate::chatml_default(), tokenizer, Some(markup))
}

/// Returns a tokenizer in which the tokens of a markup are special.
fn with_tokens(name: &str) -> Tokenizer {
    let tokens = Markup::named(name).expect("known").tokens;
    // Only the opening tag of Hermes is expected as a token.
    fixture::tokenizer_with(if name == "hermes" { &tokens[..1] } else { tokens })
}

#[test]
fn every_accepted_call_is_found_in_every_markup() {
    for name in NAMES {
        let mut found = 0;
        for (tokenizer, is_special) in [(fixture::byte_tokenizer(), false), (with_tokens(name), true)] {
            let tokenizer = Arc::new(tokenizer);
            let dialect = dialect(name, &tokenizer);
            let compiler = ConstraintCompiler::new(&tokenizer, 320, &[fixture::EOS], "calls").unwrap();
            for seed in 0..10 {
                let mut draws = Draws::new(seed);
                let tool_choice = match seed % 2 {
                    0 => ToolChoice::Required,
                    _ => ToolChoice::Named(draws.pick(&tools()).name.clone()),
                };
                let options = ChatOptions {
                    tools: tools(),
                    tool_choice,
                    parallel_tool_calls: draws.one_in(2),
                    ..ChatOptions::default()
                };
                let constraint = tool_grammar::constraint(&options, &dialect, &tokenizer).unwrap().unwrap();
                let mut state = match draws.below(3) {
                    0 => compiler.strict(&constraint, Spelling::Compact),
                    1 => compiler.strict(&constraint, Spelling::Spaced),
                    _ => compiler.compile(&constraint),
                }
                .unwrap_or_else(|error| panic!("{name} special {is_special}: {error}"));
                let walked = walk(&mut state, &tokenizer, fixture::EOS, &mut draws, 900)
                    .unwrap_or_else(|error| panic!("{name} special {is_special}: {error}"));
                let Some((text, tokens)) = walked else { continue };
                let shown = format!("{name} special {is_special} seed {seed}: {text}");
                let mut accepting = compiler.compile(&constraint).unwrap();
                assert!(tokens.iter().all(|token| accepting.try_accept(*token)), "{shown}");
                let read = read(name, &draws.pieces(&text), false);
                assert_eq!(read.text.trim(), "", "{shown}");
                assert!(!read.calls.is_empty() && read.calls.len() == read.begun.len(), "{shown}");
                for (called, arguments) in &read.calls {
                    found += 1;
                    if let ToolChoice::Named(wanted) = &options.tool_choice {
                        assert_eq!(called, wanted, "{shown}");
                    }
                    let tools = tools();
                    let tool = tools.iter().find(|tool| tool.name == *called).expect("a tool");
                    let arguments: Value = serde_json::from_str(arguments).expect(&shown);
                    let valid = jsonschema::validator_for(&tool.parameters).unwrap().validate(&arguments);
                    assert!(valid.is_ok(), "{shown}: {}", valid.unwrap_err());
                }
            }
        }
        assert!(found > 8, "{name}: {found} calls");
    }
}

#[test]
fn text_before_calls_is_unconstrained_and_calls_match_their_schema() {
    for name in NAMES {
        for tokenizer in [fixture::byte_tokenizer(), with_tokens(name)] {
            let tokenizer = Arc::new(tokenizer);
            let dialect = dialect(name, &tokenizer);
            let compiler = ConstraintCompiler::new(&tokenizer, 320, &[fixture::EOS], "calls").unwrap();
            let options = ChatOptions { tools: tools(), ..ChatOptions::default() };
            let constraint = tool_grammar::constraint(&options, &dialect, &tokenizer).unwrap().unwrap();
            let call = ToolCall {
                id: String::new(),
                name: "get.weather-now".into(),
                arguments: "{\"city\": \"Rom\", \"days\": 3}".into(),
            };
            let said = "A <tag> of [text], {braces}.";
            let opening = if name == "harmony" { "<|channel|>final<|message|>" } else { "" };
            let mut texts = vec![format!("{opening}{said}")];
            texts.push(dialect.markup.assistant("", std::slice::from_ref(&call)));
            if name != "harmony" && name != "llama3" {
                texts.push(dialect.markup.assistant(said, std::slice::from_ref(&call)));
            }
            for text in texts {
                let tokens = tokenizer.encode(&text, skep_model::SpecialTokens::Parse).unwrap();
                let mut state =
                    compiler.compile(&constraint).unwrap_or_else(|error| panic!("{name}: {error}"));
                let accepted = tokens.iter().take_while(|token| state.try_accept(**token)).count();
                assert_eq!(
                    accepted,
                    tokens.len(),
                    "{name}: {text:?} stops after {:?}",
                    tokenizer.decode(&tokens[..accepted], false)
                );
                assert!(
                    state.mask().unwrap().words()[8] >> (fixture::EOS - 256) & 1 == 1,
                    "{name}: {text:?} may end"
                );
            }
            // After the beginning of a call, only a call continues.
            let whole = dialect.markup.assistant("", std::slice::from_ref(&call));
            let begun = &whole[..whole.find("get.weather").unwrap()];
            let tokens = tokenizer.encode(&format!("{begun}rm"), skep_model::SpecialTokens::Parse).unwrap();
            let mut state = compiler.compile(&constraint).unwrap();
            assert!(
                !tokens.iter().all(|token| state.try_accept(*token)),
                "{name} allows a call of an unknown tool"
            );
        }
    }
}

#[test]
fn arguments_of_an_open_schema_are_accepted_and_read_in_every_markup() {
    let arguments = json!({"days": 3, "note": "a b"});
    for name in NAMES {
        let written = skep_model::spelled_json(&arguments);
        let call = ToolCall { id: String::new(), name: "open".into(), arguments: written };
        let text = Markup::named(name).expect("known").assistant("", &[call]);
        for tokenizer in [fixture::byte_tokenizer(), with_tokens(name)] {
            let tokenizer = Arc::new(tokenizer);
            let dialect = dialect(name, &tokenizer);
            let compiler = ConstraintCompiler::new(&tokenizer, 320, &[fixture::EOS], "calls").unwrap();
            let options = ChatOptions {
                tools: vec![tool("open", json!({"type": "object"}))],
                tool_choice: ToolChoice::Required,
                ..ChatOptions::default()
            };
            let constraint = tool_grammar::constraint(&options, &dialect, &tokenizer).unwrap().unwrap();
            let mut state = compiler.compile(&constraint).unwrap_or_else(|error| panic!("{name}: {error}"));
            let tokens = tokenizer.encode(&text, skep_model::SpecialTokens::Parse).unwrap();
            let accepted = tokens.iter().take_while(|token| state.try_accept(**token)).count();
            assert_eq!(
                accepted,
                tokens.len(),
                "{name}: {text:?} stops after {:?}",
                tokenizer.decode(&tokens[..accepted], false)
            );
        }
        check(name, &text, "", &[("open", arguments.clone())]);
    }
}

#[test]
fn calls_that_are_written_are_read() {
    let values = json!({"city": "São \"Paulo\"\n<b>", "days": 3, "exact": true});
    let call = |name: &str, arguments: &Value| ToolCall {
        id: String::new(),
        name: name.into(),
        arguments: arguments.to_string(),
    };
    for name in NAMES {
        let markup = Markup::named(name).expect("known");
        let one = [call("get.weather-now", &values)];
        check(name, &markup.assistant("", &one), "", &[("get.weather-now", values.clone())]);
        if markup.allows_many() {
            let two = [call("get.weather-now", &values), call("get", &json!({}))];
            let found = [("get.weather-now", values.clone()), ("get", json!({}))];
            check(name, &markup.assistant("Let me look.", &two), "Let me look.", &found);
            check(name, &format!("{}\n\nDone.", markup.assistant("", &two)), "Done.", &found);
        }
        let whole = markup.assistant("", &one);
        for (at, _) in whole.char_indices().skip(1) {
            // Parts of a call are never taken for a whole one with other arguments.
            for (called, arguments) in read(name, &[&whole[..at]], true).calls {
                assert_eq!(
                    (called.as_str(), serde_json::from_str::<Value>(&arguments).unwrap()),
                    ("get.weather-now", values.clone())
                );
            }
        }
    }
}

#[test]
fn kimi_calls_are_found_without_sections_prefixes_and_ends() {
    let rome = || ("get.weather-now", json!({"city": "Rome"}));
    for text in [
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.get.weather-now:0<|tool_call_argument_begin|>{\"city\": \"Rome\"}<|tool_call_end|><|tool_calls_section_end|>",
        "<|tool_call_section_begin|> <|tool_call_begin|> functions.get.weather-now:12 <|tool_call_argument_begin|> {\"city\": \"Rome\"} <|tool_call_end|>\n<|tool_call_section_end|>",
        "<|tool_call_begin|>get.weather-now:0<|tool_call_argument_begin|>{\"city\": \"Rome\"}<|tool_call_end|>",
        "<|tool_call_begin|>get.weather-now<|tool_call_argument_begin|>{\"city\": \"Rome\"}",
        "<|tool_calls_section_begin|><|tool_call_begin|>3<|tool_call_argument_begin|>{\"city\": \"Rome\"}<|tool_calls_section_end|>",
    ] {
        check("kimi-k2", text, "", &[rome()]);
    }
    let two = "<|tool_call_begin|>functions.get:0<|tool_call_argument_begin|>{}<|tool_call_begin|>functions.get.weather-now:1<|tool_call_argument_begin|>{\"city\": \"Rome\"}";
    check("kimi-k2", two, "", &[("get", json!({})), rome()]);
    let prose = "The token <|tool_call_begin|> begins a call, <|tool_calls_section_begin|> a section.";
    check("kimi-k2", prose, prose, &[]);
    let unknown = "<|tool_call_begin|>7<|tool_call_argument_begin|>{\"what\": 1}<|tool_call_end|>";
    check("kimi-k2", unknown, unknown, &[]);
    let thinking = "<think>I look it up<|tool_calls_section_begin|>";
    let mut reader = ThinkReader::new(("<think>", "</think>"), vec!["<|tool_calls_section_begin|>"], false);
    let events = [reader.push(thinking), reader.finish()].concat();
    let expected = [
        ParsedEvent::Reasoning("I look it up".into()),
        ParsedEvent::Text("<|tool_calls_section_begin|>".into()),
    ];
    assert_eq!(events, expected, "a call ends an unfinished reasoning");
}

#[test]
fn calls_with_parameters_tolerate_the_slips_of_models() {
    let rome = || ("get.weather-now", json!({"city": "Rome", "days": 2}));
    let coder = "<function=get.weather-now>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>";
    for text in [
        format!("<tool_call>\n{coder}\n</tool_call>"),
        coder.to_owned(),
        format!("<tool_call>\n{}", coder.strip_suffix("</function>").unwrap()),
        format!(
            "{}\n</tool_call>",
            coder.strip_suffix("\n</parameter>\n</function>").unwrap().to_owned() + "\n</parameter>"
        ),
        coder.replace("\n2\n", "2"),
    ] {
        check("qwen3-coder", &text, "", &[rome()]);
    }
    for prose in [
        "The tag <tool_call> begins a call.",
        "<tool_call>",
        "a <function=f> b",
        "<tool_call>\n<function=get>\nwords",
    ] {
        check("qwen3-coder", prose, prose, &[]);
    }
    check(
        "qwen3-coder",
        "<function=plot>\n<parameter=points>\n[1, 2]\n</parameter>\n<parameter=title>\nnull\n</parameter>\n<parameter=style>\n{\"wide\": True}\n</parameter>\n</function>",
        "",
        &[("plot", json!({"points": [1, 2], "title": null, "style": "{\"wide\": True}"}))],
    );
    let glm = "<tool_call>get.weather-now\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>";
    for text in [
        glm.to_owned(),
        glm.replace('\n', ""),
        glm.strip_suffix("</tool_call>").unwrap().to_owned(),
        format!("{glm}\n{glm}"),
    ] {
        let calls = text.matches("get.weather").count();
        check("glm-4.5", &text, "", &vec![rome(); calls]);
    }
    check("glm-4.5", "<tool_call>get</tool_call>", "", &[("get", json!({}))]);
    for prose in ["The tag <tool_call> begins a call.", "<tool_call>get and more", "a <arg_key> b"] {
        check("glm-4.5", prose, prose, &[]);
    }
    let dsml = "<｜DSML｜invoke name=\"get.weather-now\">\n<｜DSML｜parameter name=\"city\" string=\"true\">42</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">2</｜DSML｜parameter>\n</｜DSML｜invoke>";
    check("deepseek-v3.2", dsml, "", &[("get.weather-now", json!({"city": "42", "days": 2}))]);
    let prose = "A block <｜DSML｜function_calls> holds calls.";
    check("deepseek-v3.2", prose, prose, &[]);
}

#[test]
fn other_markups_tolerate_the_slips_of_models() {
    let rome = || ("get.weather-now", json!({"city": "Rome"}));
    let arguments = "{\"city\": \"Rome\"}";
    for (name, text) in [
        (
            "mistral-v3",
            format!(
                "[TOOL_CALLS] [{{\"name\": \"get.weather-now\", \"arguments\": {arguments}, \"id\": \"abcdefghi\"}}]"
            ),
        ),
        (
            "mistral-v3",
            format!("[TOOL_CALLS][{{\"arguments\": {arguments}, \"name\": \"get.weather-now\"}}]"),
        ),
        ("mistral-v13", format!("[TOOL_CALLS]get.weather-now{arguments}")),
        ("mistral-v13", format!("[TOOL_CALLS] get.weather-now[CALL_ID]123456789[ARGS]{arguments}")),
        ("llama3", format!("<|python_tag|>{{\"name\": \"get.weather-now\", \"parameters\": {arguments}}}")),
        (
            "llama3",
            format!(
                "\n{{\"type\": \"function\", \"function\": {{\"name\": \"get.weather-now\", \"parameters\": {arguments}}}}}"
            ),
        ),
        ("llama3", format!("{{\"name\": \"get.weather-now\", \"arguments\": {arguments}}}")),
        ("deepseek-v3.1", format!("<｜tool▁call▁begin｜>get.weather-now<｜tool▁sep｜>{arguments}")),
        (
            "deepseek-v3.1",
            format!(
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get.weather-now\n```json\n{arguments}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
            ),
        ),
        (
            "harmony",
            format!(
                "<|channel|>commentary to=functions.get.weather-now <|constrain|>json<|message|>{arguments}<|call|>"
            ),
        ),
        ("harmony", format!(" to=functions.get.weather-now<|channel|>commentary json<|message|>{arguments}")),
        ("harmony", format!("<|channel|>commentary to=get.weather-now<|message|>{arguments}<|call|>")),
    ] {
        check(name, &text, "", &[rome()]);
    }
    for (name, prose) in [
        ("mistral-v13", "The token [TOOL_CALLS] begins a call."),
        ("mistral-v3", "[TOOL_CALLS] [1, 2]"),
        ("llama3", "{\"answer\": 42} is JSON"),
        ("llama3", "Say {\"name\": \"get\", \"parameters\": {}} to call it."),
        ("deepseek-v3.1", "A <｜tool▁call▁begin｜> is a token."),
        ("harmony", "Just text."),
    ] {
        check(name, prose, prose, &[]);
    }
}

#[test]
fn reasoning_is_separated_from_the_answer() {
    let call = Markup::named("hermes")
        .unwrap()
        .assistant("", &[ToolCall { id: String::new(), name: "get".into(), arguments: "{}".into() }]);
    for (text, reasoning, said) in [
        ("<think>\nFirst, a < b.\n</think>\n\nIt is 4.".to_owned(), "First, a < b.", "It is 4."),
        ("\n<think>hm</think>Yes </think> no".to_owned(), "hm", "Yes </think> no"),
        ("<think>\n\n</think>\n\nYes".to_owned(), "", "Yes"),
        ("No <think>tags</think>".to_owned(), "", "No <think>tags</think>"),
        ("<think>never ends \n".to_owned(), "never ends", ""),
        (format!("<think>I call</think>\n{call}"), "I call", ""),
    ] {
        let read = read_in_pieces("hermes", &text, false);
        assert_eq!((read.reasoning.as_str(), read.text.as_str()), (reasoning, said), "{text:?}");
        assert_eq!(read.calls.len(), text.matches("</tool_call>").count());
    }
    let text = "<|channel|>analysis<|message|>I should look.<|end|><|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>\
                <|start|>assistant<|channel|>final<|message|>It is 4 < 5.<|return|>";
    let read = read_in_pieces("harmony", text, false);
    assert_eq!(
        (read.reasoning.as_str(), read.text.as_str()),
        ("I should look.", "One moment.\n\nIt is 4 < 5.")
    );
}
