//! An entry point for fuzz targets into the readers of answers, which are otherwise private.

use serde_json::json;

use super::message::{ToolCall, ToolSpec};
use super::parsed::ParsedEvent;
use super::reading::AnswerReader;

/// The joined events of a text.
#[derive(Debug, Default, PartialEq)]
struct Joined {
    text: String,
    reasoning: String,
    /// Name and arguments of each call that was started, as reported.
    begun: Vec<(String, String)>,
    finished: Vec<(String, String)>,
}

/// The markups whose readers are tried, besides Hermes.
const MARKUPS: [&str; 12] = [
    "kimi-k2",
    "deepseek-v3.1",
    "deepseek-v3",
    "deepseek-v3.2",
    "deepseek-v4",
    "mistral-v3",
    "mistral-v11",
    "mistral-v13",
    "qwen3-coder",
    "glm-4.5",
    "glm-4.7",
    "llama3",
];

/// Parses a text that a model may have produced, both at once and in chunks of the given number of characters.
/// It panics if the chunks give another result, if the events of a call do not add up to the call, or if text is lost.
pub fn read_tool_calls(text: &str, piece: usize, is_cut: bool) {
    let tools = tools();
    for markup in [None, Some("harmony")].into_iter().chain(MARKUPS.map(Some)) {
        read_with(markup, &tools, text, piece, is_cut);
    }
}

/// Returns tools with parameters of several types, and one without.
fn tools() -> Vec<ToolSpec> {
    let tool =
        |name: &str, parameters| ToolSpec { name: name.into(), description: String::new(), parameters };
    let properties =
        json!({"city": {"type": "string"}, "days": {"type": "integer"}, "tags": {"type": "array"}});
    let weather = json!({"type": "object", "properties": properties, "required": ["city"]});
    vec![tool("weather", weather), tool("f", json!({"type": "object"}))]
}

fn read_with(markup: Option<&str>, tools: &[ToolSpec], text: &str, piece: usize, is_cut: bool) {
    let whole = joined(markup, tools, &[text], is_cut);
    let characters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = characters.chunks(piece.max(1)).map(|piece| piece.iter().collect()).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    assert_eq!(joined(markup, tools, &pieces, is_cut), whole, "{markup:?}");
    // Headers of harmony and tags around reasoning are dropped, and so is a call that a limit cuts off.
    if whole.begun.is_empty() && !is_cut && markup != Some("harmony") && !text.contains("think>") {
        let dense = |text: &str| text.split_whitespace().collect::<String>();
        assert_eq!(dense(&format!("{}{}", whole.reasoning, whole.text)), dense(text), "{markup:?}");
    }
    assert!(whole.finished.len() <= whole.begun.len());
    for (begun, finished) in whole.begun.iter().zip(&whole.finished) {
        assert_eq!(begun, finished);
    }
}

fn joined(markup: Option<&str>, tools: &[ToolSpec], pieces: &[&str], is_cut: bool) -> Joined {
    let mut parser = match markup {
        None => AnswerReader::for_hermes(),
        Some(name) => AnswerReader::for_markup(name, Some(("<think>", "</think>")), tools),
    };
    let mut joined = Joined::default();
    for piece in pieces {
        let events = parser.push(piece);
        joined.take(events);
        let _ = parser.is_in_call();
    }
    joined.take(parser.finish(is_cut));
    joined
}

impl Joined {
    fn take(&mut self, events: Vec<ParsedEvent>) {
        for event in events {
            match event {
                ParsedEvent::Text(text) => self.text += &text,
                ParsedEvent::Reasoning(text) => self.reasoning += &text,
                ParsedEvent::CallStarted { index, name, .. } => {
                    assert_eq!(index, self.begun.len());
                    self.begun.push((name, String::new()));
                }
                ParsedEvent::Arguments { index, delta } => self.begun[index].1 += &delta,
                ParsedEvent::CallFinished { call: ToolCall { name, arguments, .. }, .. } => {
                    self.finished.push((name, arguments));
                }
            }
        }
    }
}
