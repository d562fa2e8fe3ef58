//! Tests of what readers keep: text that is not a call is never lost, markup that prose mentions included, and a limit drops
//! only what truly began a call.

use super::tests::{NAMES, Read, read, tools};
use crate::chat::ToolCall;
use crate::chat::markup::Markup;
use crate::tests::draws::Draws;

/// Parts of answers in all markups.
const WORDS: [&str; 51] = [
    "<tool_call>",
    "</tool_call>",
    "\n",
    " ",
    "{",
    "}",
    "\"",
    "get",
    "plot",
    "<function=",
    ">",
    "</function>",
    "<parameter=city>",
    "</parameter>",
    "<arg_key>",
    "</arg_key>",
    "<arg_value>",
    "</arg_value>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "[",
    "]",
    ",",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>",
    "functions.get:0",
    "<|tool_call_argument_begin|>",
    "{}",
    "<|tool_call_end|>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜DSML｜invoke name=\"",
    "\">",
    "</｜DSML｜invoke>",
    "<|channel|>",
    "analysis",
    "commentary",
    " to=functions.get",
    "<|message|>",
    "<|end|>",
    "<|start|>",
    "assistant",
    "<|call|>",
    "<think>",
    "</think>",
    "{\"name\": \"get\", \"parameters\": {}}",
    "{\"city\": \"Rom\"}",
    "<",
    "Grüße 🐝",
    "word",
];

/// Returns a text without white space and the tags around reasoning.
fn bare(text: &str) -> String {
    let text: String = text.chars().filter(|c| !c.is_whitespace()).collect();
    text.replace("<think>", "").replace("</think>", "")
}

/// Returns the characters that no beginning of a header of harmony contains, in any order: reasoning and text alternate.
fn outside_headers(text: &str) -> Vec<char> {
    let marks = Markup::named("harmony").expect("known").tokens;
    let text = marks.iter().fold(text.to_owned(), |text, mark| text.replace(mark, " "));
    let is_outside = |c: &char| !c.is_ascii_alphanumeric() && !c.is_whitespace() && !"<=._-/".contains(*c);
    let mut outside: Vec<char> = text.chars().filter(is_outside).collect();
    outside.sort_unstable();
    outside
}

fn is_kept(name: &str, text: &str, read: &Read) -> bool {
    let found = format!("{}{}", read.reasoning, read.text);
    match name {
        "harmony" => outside_headers(&found) == outside_headers(text),
        _ => bare(&found) == bare(text),
    }
}

#[test]
fn random_mixtures_of_markup_and_text_read_the_same_in_every_chunking_and_lose_no_text() {
    let mut without_calls = 0;
    for seed in 0..400 {
        let mut draws = Draws::new(seed);
        let text: String = (0..draws.below(12) + 1).map(|_| *draws.pick(&WORDS)).collect();
        for name in NAMES {
            for cut in [false, true] {
                let whole = read(name, &[&text], cut);
                assert_eq!(read(name, &draws.pieces(&text), cut), whole, "{name} seed {seed}: {text:?}");
                assert!(whole.calls.len() <= whole.begun.len());
                // A limit drops a call that has begun.
                if whole.begun.is_empty() && !(cut && whole.in_call) {
                    without_calls += 1;
                    assert!(is_kept(name, &text, &whole), "{name} seed {seed} cut {cut}: {text:?} {whole:?}");
                }
            }
        }
    }
    assert!(without_calls > 2000, "{without_calls} texts without calls");
}

#[test]
fn prose_that_mentions_markup_before_a_limit_keeps_its_end() {
    for name in NAMES {
        let mut marks: Vec<&str> = Markup::named(name).expect("known").marks().collect();
        if marks.is_empty() {
            marks = vec!["<|channel|>", "<|start|>"];
        }
        for mark in marks {
            for after in ["", " ", "\n", " begins", " begins a call of a tool", "\nbegins,"] {
                let text = format!("The text {mark}{after}");
                let read = read(name, &[&text], true);
                assert!(is_kept(name, &text, &read), "{name}: {text:?} {read:?}");
                assert!(read.calls.is_empty() && read.begun.is_empty(), "{name}: {text:?} {read:?}");
                assert!(read.text.starts_with("The text"), "{name}: {text:?} {read:?}");
            }
        }
    }
    let prose = "The token <|channel|> stands before the name of a channel";
    assert_eq!(read("harmony", &[prose], true).text, prose);
    for header in ["<|channel|>", "<|channel|>analysis", "<|start|>assistant<|channel|>comm"] {
        assert_eq!(read("harmony", &[header], true).text, "", "{header:?} is markup");
    }
    let answer = "{\"name\": \"Ann\", \"age\": 4";
    assert_eq!(read("llama3", &[answer], true).text, answer);
}

#[test]
fn a_call_that_names_its_tool_is_dropped_at_a_limit() {
    let tool = tools()[0].name.clone();
    for name in NAMES {
        let arguments = "{\"city\": \"Rome\"}".to_owned();
        let call = ToolCall { id: String::new(), name: tool.clone(), arguments };
        let whole = Markup::named(name).expect("known").assistant("", &[call]);
        // The character after a name ends it.
        let named = whole.find(tool.as_str()).expect("a name") + tool.len() + 1;
        let valued = whole.find("Rome").expect("a value") + "Rome".len();
        for at in (named..=valued).filter(|at| whole.is_char_boundary(*at)) {
            let read = read(name, &[&whole[..at]], true);
            assert_eq!((read.text.as_str(), read.calls.len()), ("", 0), "{name}: {:?}", &whole[..at]);
        }
    }
}
