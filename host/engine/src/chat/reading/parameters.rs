//! Arguments that are written one by one, each a name and a value between tags.
//!
//! Invariant: the reader finds the end of every value that the grammar of its markup allows.

use serde_json::{Map, Value};
use skep_model::spelled_json;

use crate::chat::markup::HeadForm;
use crate::chat::message::ToolSpec;
use crate::constraint::written_argument;

const MAX_NAME_BYTES: usize = 256;

/// The tags of one form.
struct Tags {
    open: &'static str,
    /// The text that ends the name and begins the value.
    value: &'static str,
    close: &'static str,
    ends: &'static [&'static str],
    /// Texts that stand where a value has no end.
    missing_ends: &'static [&'static str],
    /// Whether a line break at either edge of a value belongs to the markup.
    on_lines: bool,
}

const FUNCTION: Tags = Tags {
    open: "<parameter=",
    value: ">",
    close: "</parameter>",
    ends: &["</function>", "</tool_call>"],
    missing_ends: &["</function>\n</tool_call>"],
    on_lines: true,
};
const PAIRS: Tags = Tags {
    open: "<arg_key>",
    value: "<arg_value>",
    close: "</arg_value>",
    ends: &["</tool_call>"],
    missing_ends: &["</tool_call>"],
    on_lines: false,
};
const INVOKE: Tags = Tags {
    open: "<｜DSML｜parameter name=\"",
    value: ">",
    close: "</｜DSML｜parameter>",
    ends: &["</｜DSML｜invoke>"],
    missing_ends: &["</｜DSML｜invoke>"],
    on_lines: false,
};

/// The reader of the arguments of one call.
pub(super) struct ParameterReader {
    tags: &'static Tags,
    state: State,
    arguments: Map<String, Value>,
    /// Schema of the arguments, if the tool is known.
    schema: Value,
    /// Everything that was read, in case it is not a call.
    pub(super) text: String,
}

enum State {
    /// Between two parameters.
    Between {
        held: String,
    },
    Name {
        held: String,
    },
    Value {
        name: String,
        is_text: Option<bool>,
        body: String,
    },
}

/// The result of reading a character.
#[derive(Debug, PartialEq)]
pub(super) enum Progress {
    Nothing,
    /// The next part of the arguments as JSON.
    Parameter(String),
    /// The rest of the arguments as JSON. The call is complete.
    Ended(String),
    /// The held text is not part of the call.
    Broken(String),
}

impl ParameterReader {
    pub(super) fn new(form: HeadForm, tool: Option<&ToolSpec>) -> Self {
        let tags = match form {
            HeadForm::Pairs => &PAIRS,
            HeadForm::Invoke => &INVOKE,
            _ => &FUNCTION,
        };
        ParameterReader {
            tags,
            state: State::Between { held: String::new() },
            arguments: Map::new(),
            schema: tool.map_or(Value::Null, |tool| tool.parameters.clone()),
            text: String::new(),
        }
    }

    pub(super) fn step(&mut self, c: char) -> Progress {
        self.text.push(c);
        match std::mem::replace(&mut self.state, State::Between { held: String::new() }) {
            State::Between { mut held } => {
                held.push(c);
                let start = held.trim_start();
                if start == self.tags.open {
                    self.state = State::Name { held: String::new() };
                } else if self.tags.ends.contains(&start) {
                    return Progress::Ended(self.end());
                } else if std::iter::once(&self.tags.open)
                    .chain(self.tags.ends)
                    .any(|tag| tag.starts_with(start))
                {
                    self.state = State::Between { held };
                } else {
                    return Progress::Broken(held);
                }
                Progress::Nothing
            }
            State::Name { mut held } => {
                held.push(c);
                if held.len() > MAX_NAME_BYTES {
                    return Progress::Broken(format!("{}{held}", self.tags.open));
                }
                self.state = match held.strip_suffix(self.tags.value) {
                    Some(head) => self.value_of_head(head),
                    None => State::Name { held },
                };
                Progress::Nothing
            }
            State::Value { name, is_text, mut body } => {
                body.push(c);
                if let Some(value) = body.strip_suffix(self.tags.close) {
                    let part = self.add(&name, is_text, value);
                    return Progress::Parameter(part);
                }
                if let Some(missing) = self.tags.missing_ends.iter().find(|end| body.ends_with(**end)) {
                    let value = body[..body.len() - missing.len()].to_owned();
                    let part = self.add(&name, is_text, &value);
                    return Progress::Ended(format!("{part}{}", self.end()));
                }
                self.state = State::Value { name, is_text, body };
                Progress::Nothing
            }
        }
    }

    /// Ends the text. Returns the rest of the arguments, if there are any.
    pub(super) fn finish(&mut self) -> Option<String> {
        let state = std::mem::replace(&mut self.state, State::Between { held: String::new() });
        match state {
            State::Value { name, is_text, body } => {
                let part = self.add(&name, is_text, &body);
                Some(format!("{part}{}", self.end()))
            }
            State::Between { .. } | State::Name { .. } if !self.arguments.is_empty() => Some(self.end()),
            State::Between { .. } | State::Name { .. } => None,
        }
    }

    /// Returns whether a parameter has begun.
    pub(super) fn has_begun(&self) -> bool {
        self.has_arguments() || !matches!(self.state, State::Between { .. })
    }

    pub(super) fn has_arguments(&self) -> bool {
        !self.arguments.is_empty()
    }

    /// Returns the rest of the JSON of the arguments.
    pub(super) fn end(&self) -> String {
        if self.arguments.is_empty() { "{}".to_owned() } else { "}".to_owned() }
    }

    fn value_of_head(&self, head: &str) -> State {
        // A key of a pair has an end of its own, and a name may be followed by `string="true"`.
        let head = head.trim_end();
        let head = head.strip_suffix("</arg_key>").unwrap_or(head);
        let (name, attributes) = head.split_once('"').unwrap_or((head, ""));
        let is_text = if attributes.contains("string=\"true\"") || attributes.contains("string=\"true") {
            Some(true)
        } else {
            attributes.contains("string=\"false").then_some(false)
        };
        State::Value { name: name.trim().to_owned(), is_text, body: String::new() }
    }

    /// Adds an argument and returns its JSON. The first of several with one name counts.
    fn add(&mut self, name: &str, is_text: Option<bool>, text: &str) -> String {
        let text = match self.tags.on_lines {
            true => {
                let text = text.strip_prefix('\n').unwrap_or(text);
                text.strip_suffix('\n').unwrap_or(text)
            }
            false => text,
        };
        if self.arguments.contains_key(name) {
            return String::new();
        }
        let value = written_argument(&self.schema, name, is_text, text);
        let before = if self.arguments.is_empty() { "{" } else { ", " };
        let part = format!("{before}{}: {}", Value::from(name), spelled_json(&value));
        self.arguments.insert(name.to_owned(), value);
        part
    }
}
