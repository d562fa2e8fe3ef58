//! An entry point for fuzz targets into the parser of tool calls, which is otherwise private.

use super::message::ToolCall;
use super::tool_parser::{ParsedEvent, ToolParser};

/// The joined events of a text.
#[derive(Debug, Default, PartialEq)]
struct Joined {
    text: String,
    /// Name and arguments of each call that was started, as reported.
    begun: Vec<(String, String)>,
    finished: Vec<(String, String)>,
}

/// Parses a text that a model may have produced, both at once and in chunks of the given number of characters.
/// It panics if the chunks give another result, or if the events of a call do not add up to the call.
pub fn read_tool_calls(text: &str, piece: usize, is_cut: bool) {
    let whole = joined(&[text], is_cut);
    let characters: Vec<char> = text.chars().collect();
    let pieces: Vec<String> = characters.chunks(piece.max(1)).map(|piece| piece.iter().collect()).collect();
    let pieces: Vec<&str> = pieces.iter().map(String::as_str).collect();
    assert_eq!(joined(&pieces, is_cut), whole);
    assert!(whole.finished.len() <= whole.begun.len());
    for (begun, finished) in whole.begun.iter().zip(&whole.finished) {
        assert_eq!(begun, finished);
    }
}

fn joined(pieces: &[&str], is_cut: bool) -> Joined {
    let mut parser = ToolParser::new();
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
