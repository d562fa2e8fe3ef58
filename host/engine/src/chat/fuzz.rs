//! An entry point for fuzz targets into the readers of answers, which are otherwise private.

use super::message::ToolCall;
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
const MARKUPS: [&str; 9] = [
    "kimi-k2",
    "deepseek-v3.1",
    "deepseek-v3",
    "deepseek-v3.2",
    "mistral-v3",
    "mistral-v13",
    "qwen3-coder",
    "glm-4.5",
    "llama3",
];

/// Parses a text that a model may have produced, both at once and in chunks of the given number of characters.
/// It panics if the chunks give another result, or if the events of a call do not add up to the call.
pub fn read_tool_calls(text: &str, piece: usize, is_cut: bool) {
    for markup in [None, Some("harmony")].into_iter().chain(MARKUPS.map(Some)) {
        read_with(markup, text, piece, is_cut);
    }
}

fn read_with(markup: Option<&str>, text: &str, piece: usize, is_cut: bool) {
    let whole = joined(markup, &[text], is_cut);
    let characters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = characters.chunks(piece.max(1)).map(|piece| piece.iter().collect()).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    assert_eq!(joined(markup, &pieces, is_cut), whole, "{markup:?}");
    assert!(whole.finished.len() <= whole.begun.len());
    for (begun, finished) in whole.begun.iter().zip(&whole.finished) {
        assert_eq!(begun, finished);
    }
}

fn joined(markup: Option<&str>, pieces: &[&str], is_cut: bool) -> Joined {
    let mut parser = match markup {
        None => AnswerReader::for_hermes(),
        Some(name) => AnswerReader::for_markup(name, Some(("<think>", "</think>")), &[]),
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
