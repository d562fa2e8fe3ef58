//! Follows arguments that are written one by one, each a name and a value between tags, and checks them as the caller will
//! read them.
//!
//! Invariant: a value begins and ends where the reader of the answer finds its edges, and has the value that the reader
//! gives it.

use serde_json::{Map, Value};

use super::checks::{Checks, InvalidInstance};
use super::json_values::{Check, Found};
use crate::CallableTool;
use crate::constraint::written_argument;
use crate::json_pointer;
use crate::request::{CallPart, PartsMarkup};

/// The texts around arguments that are written one by one.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct ArgumentTags {
    /// The text between the name of the tool and its arguments.
    head: String,
    before_name: String,
    before_string: String,
    before_json: String,
    /// White space between a value and its end.
    space: String,
    close: String,
    /// The tag after the last argument.
    end: String,
    tools: Vec<CallableTool>,
}

/// The position in the arguments of one call.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct WrittenArguments {
    tool: String,
    place: Place,
}

#[derive(Debug, PartialEq, Eq)]
enum Place {
    /// Before the arguments, by this number of bytes.
    Head {
        left: usize,
    },
    /// Between two arguments, from this offset on.
    Between {
        start: usize,
    },
    Name {
        start: usize,
    },
    Value {
        start: usize,
    },
}

/// The result of following one byte.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ArgumentStep {
    Nothing,
    /// The arguments begin at this offset.
    Begun {
        start: usize,
    },
    /// A value begins at this offset. `is_text` is what the markup says about it.
    Value {
        name: String,
        is_text: Option<bool>,
        start: usize,
    },
    /// The value ended at this offset.
    ValueEnded {
        end: usize,
    },
    Ended,
}

impl ArgumentTags {
    /// Returns the tags of a markup; `None` if it writes arguments as JSON.
    pub fn of(markup: &PartsMarkup, tools: &[CallableTool]) -> Option<Self> {
        let place = |wanted: fn(&CallPart) -> bool| markup.call.iter().position(wanted);
        let name = place(|part| matches!(part, CallPart::Name))?;
        let at = place(|part| matches!(part, CallPart::Parameters(_)))?;
        let CallPart::Parameters(parameters) = &markup.call[at] else { return None };
        let after_value = joined(&parameters.after_value);
        let space = after_value.find(&parameters.close).map_or("", |at| &after_value[..at]);
        let after = joined(&markup.call[at + 1..]);
        let end = after.find('>').map_or(&after[..], |at| &after[..=at]);
        Some(ArgumentTags {
            head: joined(&markup.call[name + 1..at]),
            before_name: joined(&parameters.before_name),
            before_string: joined(&parameters.before_string),
            before_json: joined(&parameters.before_json),
            space: space.to_owned(),
            close: parameters.close.clone(),
            end: end.to_owned(),
            tools: tools.to_vec(),
        })
    }

    /// Returns the error that comes first in the text of a value, if there is one.
    pub fn flaw(&self, checks: &Checks, found: &Found, text: &[u8]) -> Option<InvalidInstance> {
        match found.check {
            Check::Argument { entry, is_text } => {
                let name = found.pointer.strip_prefix('/').unwrap_or_default();
                let name = json_pointer::unescape(name);
                let written = String::from_utf8_lossy(text);
                let value = self.value(found, &name, is_text, &written);
                // The position of an error within JSON is known.
                if serde_json::from_slice::<Value>(text).is_ok_and(|json| json == value) {
                    return checks.flaw(Check::Schema(entry), text);
                }
                let (pointer, reason) = checks.errors(entry, &value).into_iter().next()?;
                // The choice to end a text may be the wrong one.
                Some(InvalidInstance { pointer, reason, end: text.len() + self.space.len() + 1 })
            }
            Check::Arguments(entry) => {
                let (arguments, ends) = self.read(found, text);
                let end = |pointer: &str| {
                    let name = json_pointer::unescape(pointer.split('/').nth(1)?);
                    ends.iter().find(|(ended, _)| *ended == name).map(|(_, end)| *end)
                };
                let flaw = |(pointer, reason): (String, String)| {
                    let end = end(&pointer).unwrap_or(text.len());
                    InvalidInstance { pointer, reason, end }
                };
                let errors = checks.errors(entry, &Value::Object(arguments));
                errors.into_iter().map(flaw).min_by_key(|flaw| flaw.end)
            }
            Check::Schema(_) | Check::FiniteNumber => checks.flaw(found.check, text),
        }
    }

    fn value(&self, found: &Found, name: &str, is_text: Option<bool>, text: &str) -> Value {
        let tool = self.tools.iter().find(|tool| Some(&tool.name) == found.tool.as_ref());
        written_argument(tool.map_or(&Value::Null, |tool| &tool.parameters), name, is_text, text)
    }

    /// Reads arguments. Returns them, and the offset after each.
    fn read(&self, found: &Found, text: &[u8]) -> (Map<String, Value>, Vec<(String, usize)>) {
        let (mut arguments, mut ends) = (Map::new(), Vec::new());
        let mut following = WrittenArguments { tool: String::new(), place: Place::Between { start: 0 } };
        let mut begun = None;
        for offset in 0..text.len() {
            match following.step(self, text, offset) {
                ArgumentStep::Value { name, is_text, start } => begun = Some((name, is_text, start)),
                ArgumentStep::ValueEnded { end } => {
                    let Some((name, is_text, start)) = begun.take() else { continue };
                    let value = String::from_utf8_lossy(&text[start..end]);
                    let value = self.value(found, &name, is_text, &value);
                    // The first of several with one name counts.
                    arguments.entry(name.clone()).or_insert(value);
                    ends.push((name, end + self.space.len() + 1));
                }
                ArgumentStep::Nothing | ArgumentStep::Begun { .. } | ArgumentStep::Ended => {}
            }
        }
        (arguments, ends)
    }
}

impl WrittenArguments {
    /// Begins after the name of a tool.
    pub fn new(tool: String, tags: &ArgumentTags) -> Self {
        WrittenArguments { tool, place: Place::Head { left: tags.head.len() } }
    }

    /// Returns the name of the tool.
    pub fn tool(&self) -> &str {
        &self.tool
    }

    /// Takes the byte of `output` at `offset`.
    pub fn step(&mut self, tags: &ArgumentTags, output: &[u8], offset: usize) -> ArgumentStep {
        let next = offset + 1;
        match &mut self.place {
            Place::Head { left: 0 } => {
                // Without a text before the arguments, this byte is theirs.
                self.place = Place::Between { start: offset };
                ArgumentStep::Begun { start: offset }
            }
            Place::Head { left: 1 } => {
                self.place = Place::Between { start: next };
                ArgumentStep::Begun { start: next }
            }
            Place::Head { left } => {
                *left -= 1;
                ArgumentStep::Nothing
            }
            Place::Between { start } => {
                let read = output[*start..next].trim_ascii_start();
                if read == tags.before_name.as_bytes() {
                    self.place = Place::Name { start: next };
                    ArgumentStep::Nothing
                } else if read == tags.end.as_bytes() {
                    ArgumentStep::Ended
                } else {
                    ArgumentStep::Nothing
                }
            }
            Place::Name { start } => {
                let read = &output[*start..next];
                let ended = |by: &str| read.strip_suffix(by.as_bytes());
                let is_told = tags.before_string != tags.before_json;
                let (name, is_text) = match (ended(&tags.before_string), ended(&tags.before_json)) {
                    (Some(name), _) => (name, is_told.then_some(true)),
                    (None, Some(name)) => (name, Some(false)),
                    (None, None) => return ArgumentStep::Nothing,
                };
                let name = String::from_utf8_lossy(name).into_owned();
                self.place = Place::Value { start: next };
                ArgumentStep::Value { name, is_text, start: next }
            }
            Place::Value { start } => {
                let start = *start;
                let Some(before) = output[..next].strip_suffix(tags.close.as_bytes()) else {
                    return ArgumentStep::Nothing;
                };
                self.place = Place::Between { start: next };
                let value = before.strip_suffix(tags.space.as_bytes()).unwrap_or(before);
                ArgumentStep::ValueEnded { end: value.len().max(start) }
            }
        }
    }
}

/// Returns the texts of parts that stand next to each other.
fn joined(parts: &[CallPart]) -> String {
    let texts = parts.iter().map_while(|part| match part {
        CallPart::Text(text) | CallPart::Token(_, text) => Some(text.as_str()),
        _ => None,
    });
    texts.collect()
}
