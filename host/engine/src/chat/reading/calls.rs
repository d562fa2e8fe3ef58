//! A reader of calls that are marked by texts: it finds where calls begin, reads their heads and arguments, and drops the
//! markup around them.
//!
//! A call whose head cannot be read becomes text, markup included. A call that a limit cut off is dropped if it names a
//! tool or its arguments have begun, and otherwise it is text, because prose may mention the markup; a call that the
//! model itself left open becomes text, unless some of its arguments have been reported.

use serde_json::Value;

use super::heads::{Head, read_head, read_object};
use super::parameters::{ParameterReader, Progress};
use crate::chat::call_object::{begins_call, read_name};
use crate::chat::json_scan::JsonScan;
use crate::chat::markup::{CallReading, HeadForm};
use crate::chat::message::{ToolCall, ToolSpec};
use crate::chat::parsed::{ParsedEvent, ParsedEvents};

pub(super) struct CallReader {
    reading: &'static CallReading,
    tools: Vec<ToolSpec>,
    state: State,
    /// Whether anything but white space came before.
    said: bool,
    /// Whether the calls are items of a list.
    in_list: bool,
    events: ParsedEvents,
}

enum State {
    /// Outside of a call. `space` is white space that is dropped if a call comes next; `marker` is the beginning of a
    /// text that may begin calls.
    Text {
        space: String,
        marker: String,
        after_call: bool,
    },
    /// After a text that stands before calls; `held` is that text and the white space after it.
    Section {
        held: String,
        marker: String,
    },
    /// In a call whose name is not known yet. `before` is the markup before `body`.
    Head {
        before: String,
        body: String,
        form: HeadForm,
    },
    Arguments {
        call: ToolCall,
        scan: JsonScan,
        in_object: bool,
    },
    /// After the arguments of an object, which is not complete.
    Wrapper {
        call: ToolCall,
        scan: JsonScan,
    },
    Parameters {
        before: String,
        name: String,
        call: Option<ToolCall>,
        reader: Box<ParameterReader>,
    },
    /// In an object of another form, or in arguments without a name, which are read as a whole.
    Body {
        before: String,
        body: String,
        scan: JsonScan,
        is_call: bool,
    },
    /// After a call; `held` may be the beginning of a text that ends calls.
    Behind {
        held: String,
    },
}

impl State {
    fn text(after_call: bool) -> Self {
        State::Text { space: String::new(), marker: String::new(), after_call }
    }
}

impl CallReader {
    pub(super) fn new(reading: &'static CallReading, tools: &[ToolSpec]) -> Self {
        CallReader {
            reading,
            tools: tools.to_vec(),
            state: State::text(false),
            said: false,
            in_list: false,
            events: ParsedEvents::default(),
        }
    }

    pub(super) fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        for c in delta.chars() {
            self.step(c);
        }
        self.events.take()
    }

    pub(super) fn finish(&mut self, cut: bool) -> Vec<ParsedEvent> {
        match std::mem::replace(&mut self.state, State::text(false)) {
            State::Text { space, marker, after_call } => {
                if !after_call {
                    self.text(&space);
                }
                self.text(&marker);
            }
            State::Section { held, marker } => self.text(&format!("{held}{marker}")),
            State::Wrapper { call, .. } => self.events.finish_call(call),
            State::Behind { held } => self.text(held.trim()),
            State::Parameters { before, name, call, mut reader } if !cut => match reader.finish() {
                Some(rest) => self.end_parameters(&name, call, &rest),
                None => self.text(&format!("{before}{}", reader.text)),
            },
            State::Parameters { name, call, reader, .. }
                if call.is_some() || reader.has_begun() || self.has_tool(&name) => {}
            State::Parameters { before, reader, .. } => self.text(&format!("{before}{}", reader.text)),
            State::Head { before, body, form } if cut && self.is_of_call(&before, &body, form) => {}
            State::Body { before, body, is_call, .. }
                if cut && (!is_call || is_item(&before) || begins_call(&body)) => {}
            State::Head { before, body, .. } | State::Body { before, body, .. } => {
                self.text(&format!("{before}{body}"));
            }
            State::Arguments { .. } => {}
        }
        self.events.take()
    }

    /// Returns whether a head that was cut off names a tool of the request, or stands after a call in a list.
    fn is_of_call(&self, before: &str, body: &str, form: HeadForm) -> bool {
        is_item(before)
            || match form {
                HeadForm::Object => read_name(body).is_ok_and(|(name, _)| self.has_tool(&name)),
                _ => body
                    .split(|c: char| c.is_whitespace() || "<>[]{}:|\"｜".contains(c))
                    .any(|word| self.has_tool(word.strip_prefix("functions.").unwrap_or(word))),
            }
    }

    fn has_tool(&self, name: &str) -> bool {
        self.tools.iter().any(|tool| tool.name == name)
    }

    pub(super) fn is_in_call(&self) -> bool {
        match self.state {
            State::Head { .. } | State::Arguments { .. } | State::Parameters { .. } | State::Body { .. } => {
                true
            }
            State::Text { .. } | State::Section { .. } | State::Wrapper { .. } | State::Behind { .. } => {
                false
            }
        }
    }

    fn step(&mut self, c: char) {
        let state = std::mem::replace(&mut self.state, State::text(false));
        self.state = match state {
            State::Text { space, marker, after_call } => self.step_text(space, marker, after_call, c),
            State::Section { held, marker } => self.step_section(held, marker, c),
            State::Head { before, mut body, form } => {
                body.push(c);
                self.after_head(before, body, form)
            }
            State::Arguments { mut call, mut scan, in_object } => {
                call.arguments.push(c);
                self.events.arguments(c.encode_utf8(&mut [0; 4]));
                match scan.push(c) {
                    true if in_object => State::Wrapper { call, scan: JsonScan::opened() },
                    true => {
                        self.events.finish_call(call);
                        State::Behind { held: String::new() }
                    }
                    false => State::Arguments { call, scan, in_object },
                }
            }
            State::Wrapper { call, mut scan } => match scan.push(c) {
                true => {
                    self.events.finish_call(call);
                    State::Behind { held: String::new() }
                }
                false => State::Wrapper { call, scan },
            },
            State::Parameters { before, name, call, reader } => {
                self.step_parameters(before, name, call, reader, c)
            }
            State::Body { before, body, scan, is_call } => self.step_body(before, body, scan, is_call, c),
            State::Behind { mut held } => {
                held.push(c);
                self.step_behind(held)
            }
        };
    }

    /// Steps through each character of a text that was held back.
    fn reread(&mut self, state: State, text: &str) -> State {
        self.state = state;
        for c in text.chars() {
            self.step(c);
        }
        std::mem::replace(&mut self.state, State::text(false))
    }

    fn step_text(&mut self, mut space: String, mut marker: String, mut after_call: bool, c: char) -> State {
        if marker.is_empty() && c.is_whitespace() {
            space.push(c);
            return State::Text { space, marker, after_call };
        }
        if marker.is_empty() && c == '{' && self.reading.bare && (after_call || !self.said) {
            return State::Head { before: space, body: "{".to_owned(), form: HeadForm::Object };
        }
        let reading = self.reading;
        let texts = || reading.opens.iter().chain(reading.sections);
        marker.push(c);
        if reading.opens.contains(&marker.as_str()) {
            let before = if after_call { marker } else { space + &marker };
            return State::Head { before, body: String::new(), form: reading.head };
        }
        if reading.sections.contains(&marker.as_str()) {
            let held = if after_call { marker } else { space + &marker };
            return State::Section { held, marker: String::new() };
        }
        if texts().any(|text| text.starts_with(&marker)) {
            return State::Text { space, marker, after_call };
        }
        // The text does not begin a call after all, but a later part of it may.
        if !after_call {
            self.text(&space);
        }
        (space, after_call) = (String::new(), false);
        let next = marker.char_indices().map(|(at, _)| at).skip(1);
        let next = next.chain([marker.len()]).find(|at| {
            let rest = &marker[*at..];
            rest.is_empty() || texts().any(|text| text.starts_with(rest))
        });
        let rest = marker.split_off(next.unwrap_or(marker.len()));
        let (said, trailing) = marker.split_at(marker.trim_end().len());
        self.text(said);
        space.push_str(trailing);
        State::Text { space, marker: rest, after_call }
    }

    fn step_section(&mut self, mut held: String, mut marker: String, c: char) -> State {
        if marker.is_empty() && c.is_whitespace() {
            held.push(c);
            return State::Section { held, marker };
        }
        marker.push(c);
        if self.reading.opens.contains(&marker.as_str()) {
            return State::Head { before: held + &marker, body: String::new(), form: self.reading.head };
        }
        if self.reading.opens.iter().any(|open| open.starts_with(&marker)) {
            return State::Section { held, marker };
        }
        // The text before the calls is not followed by one.
        self.text(&held);
        self.reread(State::text(false), &marker)
    }

    fn after_head(&mut self, before: String, body: String, form: HeadForm) -> State {
        match read_head(form, &body) {
            Head::Partial => State::Head { before, body, form },
            Head::Arguments { name, in_object } => {
                let call = self.start_call(name);
                let call = ToolCall { arguments: "{".to_owned(), ..call };
                self.events.arguments("{");
                State::Arguments { call, scan: JsonScan::opened(), in_object }
            }
            Head::Nameless => State::Body {
                before: before + &body[..body.len() - 1],
                body: "{".to_owned(),
                scan: JsonScan::opened(),
                is_call: false,
            },
            Head::List => {
                self.in_list = true;
                State::Head { before: before + &body, body: String::new(), form: HeadForm::Object }
            }
            Head::Parameters { name, rest } => {
                let tool = self.tools.iter().find(|tool| tool.name == name);
                let reader = Box::new(ParameterReader::new(self.reading.head, tool));
                let before = before + &body[..body.len() - rest.len()];
                self.reread(State::Parameters { before, name, call: None, reader }, &rest)
            }
            Head::Other if body.trim_start().starts_with('{') => {
                let mut scan = JsonScan::default();
                let blanks = body.len() - body.trim_start().len();
                let before = before + &body[..blanks];
                self.reread_body(before, &body[blanks..], &mut scan)
            }
            Head::Other => self.not_a_call(&before, &body),
        }
    }

    /// Reads the beginning of an object again, which may hold a call in another order.
    fn reread_body(&mut self, before: String, text: &str, scan: &mut JsonScan) -> State {
        let mut body = String::new();
        for (at, c) in text.char_indices() {
            body.push(c);
            if scan.push(c) {
                let state = self.read_body(&before, &body, true);
                return self.reread(state, &text[at + c.len_utf8()..]);
            }
        }
        State::Body { before, body, scan: scan.clone(), is_call: true }
    }

    fn step_body(
        &mut self,
        before: String,
        mut body: String,
        mut scan: JsonScan,
        is_call: bool,
        c: char,
    ) -> State {
        body.push(c);
        match scan.push(c) {
            true => self.read_body(&before, &body, is_call),
            false => State::Body { before, body, scan, is_call },
        }
    }

    /// Reads a complete object: a call, or arguments without a name.
    fn read_body(&mut self, before: &str, body: &str, is_call: bool) -> State {
        let found = match is_call {
            true => read_object(body),
            false => self.tool_of(body).map(|name| (name, body.to_owned())),
        };
        let Some((name, arguments)) = found else { return self.not_a_call(before, body) };
        let call = ToolCall { arguments, ..self.start_call(name) };
        self.events.arguments(&call.arguments);
        self.events.finish_call(call);
        State::Behind { held: String::new() }
    }

    /// Returns the only tool that takes these arguments.
    fn tool_of(&self, arguments: &str) -> Option<String> {
        let Value::Object(arguments) = serde_json::from_str(arguments).ok()? else { return None };
        let takes = |tool: &&ToolSpec| {
            let described = tool.parameters.get("properties").and_then(Value::as_object);
            let required = tool.parameters.get("required").and_then(Value::as_array);
            let is_described =
                |name: &String| described.is_some_and(|described| described.contains_key(name));
            let is_there = |name: &Value| name.as_str().is_none_or(|name| arguments.contains_key(name));
            arguments.keys().all(is_described)
                && required.is_none_or(|required| required.iter().all(is_there))
        };
        let mut takers = self.tools.iter().filter(takes);
        match (takers.next(), takers.next(), self.tools.as_slice()) {
            (Some(tool), None, _) | (None, None, [tool]) => Some(tool.name.clone()),
            _ => None,
        }
    }

    fn step_parameters(
        &mut self,
        before: String,
        name: String,
        mut call: Option<ToolCall>,
        mut reader: Box<ParameterReader>,
        c: char,
    ) -> State {
        match reader.step(c) {
            Progress::Nothing => State::Parameters { before, name, call, reader },
            Progress::Parameter(part) => {
                let begun = call.get_or_insert_with(|| self.start_call(name.clone()));
                begun.arguments.push_str(&part);
                self.events.arguments(&part);
                State::Parameters { before, name, call, reader }
            }
            Progress::Ended(rest) => {
                self.end_parameters(&name, call, &rest);
                State::Behind { held: String::new() }
            }
            Progress::Broken(held) if reader.has_arguments() => {
                let rest = reader.end();
                self.end_parameters(&name, call, &rest);
                self.reread(State::Behind { held: String::new() }, &held)
            }
            Progress::Broken(_) => self.not_a_call(&before, &reader.text),
        }
    }

    fn end_parameters(&mut self, name: &str, call: Option<ToolCall>, rest: &str) {
        let mut call = call.unwrap_or_else(|| self.start_call(name.to_owned()));
        call.arguments.push_str(rest);
        self.events.arguments(rest);
        self.events.finish_call(call);
    }

    /// Turns markup that is not a call into text. The text after the first mark is read again.
    fn not_a_call(&mut self, before: &str, body: &str) -> State {
        self.in_list = false;
        self.text(before);
        if self.reading.bare && before.trim().is_empty() {
            // An object at the beginning is text as a whole.
            self.text(body);
            return State::text(false);
        }
        self.reread(State::text(false), body)
    }

    fn step_behind(&mut self, held: String) -> State {
        let mut rest = held.trim_start();
        if self.in_list {
            match rest.chars().next() {
                None => return State::Behind { held },
                Some(',') => {
                    let form = HeadForm::Object;
                    return State::Head { before: ",".to_owned(), body: String::new(), form };
                }
                Some(']') => {
                    self.in_list = false;
                    rest = rest[1..].trim_start();
                }
                Some(_) => self.in_list = false,
            }
        }
        while let Some(closer) = self.reading.closers.iter().find(|closer| rest.starts_with(**closer)) {
            rest = rest[closer.len()..].trim_start();
        }
        if rest.is_empty() || self.reading.closers.iter().any(|closer| closer.starts_with(rest)) {
            return State::Behind { held: rest.to_owned() };
        }
        let rest = rest.to_owned();
        self.reread(State::text(true), &rest)
    }

    fn start_call(&mut self, name: String) -> ToolCall {
        self.said = true;
        self.events.start_call(name)
    }

    fn text(&mut self, text: &str) {
        self.said |= !text.trim().is_empty();
        self.events.text(text);
    }
}

/// Returns whether the text before a call separates it from the one before it in a list.
fn is_item(before: &str) -> bool {
    before.starts_with(',')
}
