//! A reader of answers that are a sequence of messages in channels.
//!
//! Invariant: the content of every message is reasoning, text or the arguments of a call. Only headers and the tokens
//! between messages are dropped.

use crate::chat::json_scan::JsonScan;
use crate::chat::markup::harmony::{CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START};
use crate::chat::message::ToolCall;
use crate::chat::parsed::{ParsedEvent, ParsedEvents};

/// Maximum size of a header.
const MAX_HEADER_BYTES: usize = 512;
/// Texts that end the content of a message.
const ENDS: [&str; 5] = [END, CALL, RETURN, START, CHANNEL];

pub(super) struct HarmonyReader {
    /// Whether messages to tools are calls.
    makes_calls: bool,
    state: State,
    /// Whether a message with text has ended, so that a line break stands before the next one.
    has_text: bool,
    events: ParsedEvents,
}

enum State {
    /// In the header of a message, up to `MESSAGE`.
    Header { held: String },
    /// In the content of a message; `held` may be the beginning of its end.
    Content { content: Content, held: String },
    /// After a message.
    Between { held: String },
}

enum Content {
    Reasoning,
    Text,
    /// The arguments of a call have not begun; `header` is text if none come.
    Call {
        name: String,
        header: String,
    },
    Arguments {
        call: ToolCall,
        scan: JsonScan,
    },
    /// After the arguments of a call.
    Called,
}

impl HarmonyReader {
    pub(super) fn new(makes_calls: bool) -> Self {
        // The prompt ends with the role of the first message.
        let state = State::Header { held: String::new() };
        HarmonyReader { makes_calls, state, has_text: false, events: ParsedEvents::default() }
    }

    pub(super) fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        for c in delta.chars() {
            self.step(c);
        }
        self.events.take()
    }

    pub(super) fn finish(&mut self, cut: bool) -> Vec<ParsedEvent> {
        match std::mem::replace(&mut self.state, State::Between { held: String::new() }) {
            State::Header { held } if !(cut && is_header(&held)) => self.events.text(&held),
            State::Content { content: Content::Call { header, .. }, held } if !cut => {
                self.events.text(&format!("{header}{held}"));
            }
            State::Content { content: Content::Reasoning, held } => self.events.reasoning(&held),
            State::Content { content: Content::Text, held } => self.events.text(&held),
            State::Between { held } => self.events.text(held.trim()),
            State::Header { .. } | State::Content { .. } => {}
        }
        self.events.take()
    }

    pub(super) fn is_in_call(&self) -> bool {
        let content = match &self.state {
            State::Content { content, .. } => content,
            State::Header { held } => return held.contains("to="),
            State::Between { .. } => return false,
        };
        matches!(content, Content::Call { .. } | Content::Arguments { .. })
    }

    fn step(&mut self, c: char) {
        self.state = match std::mem::replace(&mut self.state, State::Between { held: String::new() }) {
            State::Header { mut held } => {
                held.push(c);
                if let Some(header) = held.strip_suffix(MESSAGE) {
                    State::Content { content: self.content_of(header, &held), held: String::new() }
                } else if may_be_header(&held) {
                    State::Header { held }
                } else {
                    // The first character is text, so that the rest is not taken for the same header.
                    let rest = held.split_off(held.chars().next().map_or(0, char::len_utf8));
                    self.begin_text();
                    self.events.text(&held);
                    self.reread(State::Content { content: Content::Text, held: String::new() }, &rest)
                }
            }
            State::Content { content, mut held } => {
                // Markers within the strings of arguments are part of them.
                if let Content::Arguments { scan, .. } = &content
                    && scan.in_string()
                {
                    return self.state = self.say(content, c);
                }
                held.push(c);
                if let Some(end) = ENDS.iter().find(|end| **end == held) {
                    self.end_content(content);
                    match *end {
                        START | CHANNEL => State::Header { held },
                        _ => State::Between { held: String::new() },
                    }
                } else if ENDS.iter().any(|end| end.starts_with(held.as_str())) {
                    State::Content { content, held }
                } else {
                    let first = held.remove(0);
                    let state = self.say(content, first);
                    self.reread(state, &held)
                }
            }
            State::Between { mut held } => {
                held.push(c);
                let start = held.trim_start();
                if start == START || start == CHANNEL {
                    State::Header { held: start.to_owned() }
                } else if start.is_empty() || [START, CHANNEL].iter().any(|mark| mark.starts_with(start)) {
                    State::Between { held }
                } else {
                    let start = start.to_owned();
                    self.begin_text();
                    self.reread(State::Content { content: Content::Text, held: String::new() }, &start)
                }
            }
        };
    }

    fn reread(&mut self, state: State, text: &str) -> State {
        self.state = state;
        for c in text.chars() {
            self.step(c);
        }
        std::mem::replace(&mut self.state, State::Between { held: String::new() })
    }

    /// Returns the kind of the content after a header.
    fn content_of(&mut self, header: &str, whole: &str) -> Content {
        let word = |after: &str| {
            let (_, rest) = header.split_once(after)?;
            let rest = rest.trim_start();
            Some(rest[..rest.find([' ', '<', '\n']).unwrap_or(rest.len())].to_owned())
        };
        if let Some(recipient) = word("to=").filter(|_| self.makes_calls) {
            let name = recipient.strip_prefix("functions.").unwrap_or(&recipient).to_owned();
            return Content::Call { name, header: whole.to_owned() };
        }
        match word(CHANNEL).as_deref() {
            Some("analysis") => Content::Reasoning,
            _ => {
                self.begin_text();
                Content::Text
            }
        }
    }

    /// Takes a character of a message's content.
    fn say(&mut self, content: Content, c: char) -> State {
        let content = match content {
            Content::Reasoning => {
                self.events.reasoning(c.encode_utf8(&mut [0; 4]));
                Content::Reasoning
            }
            Content::Text => {
                self.events.text(c.encode_utf8(&mut [0; 4]));
                Content::Text
            }
            Content::Call { name, header } if c.is_whitespace() => Content::Call { name, header },
            Content::Call { name, .. } if c == '{' => {
                let call = ToolCall { arguments: "{".to_owned(), ..self.events.start_call(name) };
                self.events.arguments("{");
                let scan = JsonScan::opened();
                Content::Arguments { call, scan }
            }
            Content::Call { header, .. } => {
                self.begin_text();
                self.events.text(&header);
                self.events.text(c.encode_utf8(&mut [0; 4]));
                Content::Text
            }
            Content::Arguments { mut call, mut scan } => {
                call.arguments.push(c);
                self.events.arguments(c.encode_utf8(&mut [0; 4]));
                match scan.push(c) {
                    true => {
                        self.events.finish_call(call);
                        Content::Called
                    }
                    false => Content::Arguments { call, scan },
                }
            }
            Content::Called if c.is_whitespace() => Content::Called,
            Content::Called => {
                self.begin_text();
                self.events.text(c.encode_utf8(&mut [0; 4]));
                Content::Text
            }
        };
        State::Content { content, held: String::new() }
    }

    fn end_content(&mut self, content: Content) {
        match content {
            Content::Text => self.has_text = true,
            Content::Call { header, .. } => self.events.text(&header),
            Content::Reasoning | Content::Arguments { .. } | Content::Called => {}
        }
    }

    fn begin_text(&mut self) {
        if self.has_text {
            self.events.text("\n\n");
            self.has_text = false;
        }
    }
}

/// Returns whether a text is the beginning of a header as models write it, rather than prose that mentions a mark.
fn is_header(text: &str) -> bool {
    let text = text.trim_start();
    if ![START, CHANNEL, "to="].iter().any(|mark| text.starts_with(mark)) {
        return false;
    }
    let plain =
        [START, CHANNEL, CONSTRAIN].iter().fold(text.to_owned(), |text, mark| text.replace(mark, " "));
    // A mark that is not complete is not a word.
    let plain = &plain[..plain.find('<').unwrap_or(plain.len())];
    let words = ["assistant", "analysis", "commentary", "final", "json", "code"];
    plain
        .split_whitespace()
        .all(|word| word.starts_with("to=") || words.iter().any(|known| known.starts_with(word)))
}

/// Returns whether a text may be the beginning of a header.
fn may_be_header(text: &str) -> bool {
    if text.len() > MAX_HEADER_BYTES {
        return false;
    }
    let mut rest = text.strip_prefix(START).unwrap_or(text);
    rest = rest.strip_prefix("assistant").unwrap_or(rest).trim_start();
    if START.starts_with(rest) || "assistant".starts_with(rest) {
        return true;
    }
    let starts = |mark: &str| rest.starts_with(mark) || mark.starts_with(rest);
    if !(starts(CHANNEL) || starts("to=") || starts(CONSTRAIN)) {
        return false;
    }
    // Apart from the marks, a header consists of words.
    let mut plain = rest.replace(CHANNEL, " ").replace(CONSTRAIN, " ");
    if let Some(at) = plain.rfind('<') {
        let mark = &plain[at..];
        if ![CHANNEL, CONSTRAIN, MESSAGE].iter().any(|known| known.starts_with(mark)) {
            return false;
        }
        plain.truncate(at);
    }
    plain.chars().all(|c| c.is_ascii_alphanumeric() || " =._-/".contains(c))
}
