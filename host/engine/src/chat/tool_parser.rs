//! A parser that finds tool calls in text while it is generated.
//!
//! Invariant: the parser moves one character at a time, so the events, with neighboring deltas joined, are the
//! same however the text was cut into chunks. Text that may still become a marker is held back.
//!
//! White space next to a call is dropped. A call whose body is not `{"name": …, "arguments": {…}}` in JSON
//! becomes text, markup included, once it is complete. A call that a limit cut off is dropped if its name is known, and
//! otherwise it is text, because prose may mention the marker; a call that the model itself left open becomes text,
//! unless some of its arguments have been reported.

use serde_json::Value;

use super::call_object::{self, Unread, begins_call, read_name, skip};
use super::json_scan::JsonScan;
use super::markup::{CLOSE, OPEN};
use super::message::ToolCall;
use super::parsed::{ParsedEvent, ParsedEvents};

/// Maximum size of a call's head. The head is parsed again for each of its characters, so it must stay short.
const MAX_HEAD_BYTES: usize = 512;

pub(super) struct ToolParser {
    state: State,
    events: ParsedEvents,
}

enum State {
    /// Outside of a call. `space` is white space that is dropped if a call comes next; `marker` is the
    /// beginning of `OPEN`.
    Text {
        space: String,
        marker: String,
        after_call: bool,
    },
    /// In a call whose name is not known yet. `before` is the white space before it, in case it is text.
    Head {
        before: String,
        body: String,
    },
    Arguments {
        call: ToolCall,
        scan: JsonScan,
    },
    /// The arguments are complete; the call ends with `CLOSE`.
    Tail {
        call: ToolCall,
        rest: String,
    },
    /// In a call of another form, which is parsed as a whole.
    Body {
        before: String,
        body: String,
        scan: Option<JsonScan>,
        json_ended: bool,
    },
}

impl State {
    fn text(after_call: bool) -> Self {
        State::Text { space: String::new(), marker: String::new(), after_call }
    }
}

impl ToolParser {
    pub(super) fn new() -> Self {
        ToolParser { state: State::text(false), events: ParsedEvents::default() }
    }

    /// Takes the next chunk of text and returns the events that it completed.
    pub(super) fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        for c in delta.chars() {
            self.step(c);
        }
        self.events.take()
    }

    /// Ends the text. `cut` says that a limit or a stop string ended it, not the model.
    pub(super) fn finish(&mut self, cut: bool) -> Vec<ParsedEvent> {
        match std::mem::replace(&mut self.state, State::text(false)) {
            State::Text { space, marker, after_call } => {
                if !after_call {
                    self.events.text(&space);
                }
                self.events.text(&marker);
            }
            State::Tail { call, .. } => self.events.finish_call(call),
            State::Arguments { .. } => {}
            State::Head { body, .. } if cut && read_name(&body).is_ok() => {}
            State::Body { body, scan: Some(_), .. } if cut && begins_call(&body) => {}
            State::Head { before, body } | State::Body { before, body, .. } => {
                self.markup_as_text(&before, &body);
            }
        }
        self.events.take()
    }

    /// Returns whether a call has started whose arguments are not complete.
    pub(super) fn is_in_call(&self) -> bool {
        match self.state {
            State::Head { .. } | State::Arguments { .. } | State::Body { .. } => true,
            State::Text { .. } | State::Tail { .. } => false,
        }
    }

    fn step(&mut self, c: char) {
        let state = std::mem::replace(&mut self.state, State::text(false));
        self.state = match state {
            State::Text { space, marker, after_call } => self.step_text(space, marker, after_call, c),
            State::Head { before, mut body } => {
                body.push(c);
                match read_head(&body) {
                    Head::Partial => State::Head { before, body },
                    Head::Complete(name) => self.start_arguments(name),
                    Head::Other => Self::reread_as_body(before, body),
                }
            }
            State::Arguments { mut call, mut scan } => {
                call.arguments.push(c);
                self.events.arguments(c.encode_utf8(&mut [0; 4]));
                if scan.push(c) {
                    State::Tail { call, rest: String::new() }
                } else {
                    State::Arguments { call, scan }
                }
            }
            State::Tail { call, mut rest } => {
                rest.push(c);
                if rest.ends_with(CLOSE) {
                    self.events.finish_call(call);
                    State::text(true)
                } else {
                    State::Tail { call, rest }
                }
            }
            State::Body { before, body, scan, json_ended } => {
                self.step_body(before, body, scan, json_ended, c)
            }
        };
    }

    fn step_text(&mut self, mut space: String, mut marker: String, mut after_call: bool, c: char) -> State {
        if !OPEN[marker.len()..].starts_with(c) && !marker.is_empty() {
            // The text is not a call after all.
            if !after_call {
                self.events.text(&space);
            }
            self.events.text(&marker);
            (space, marker, after_call) = (String::new(), String::new(), false);
        }
        if OPEN[marker.len()..].starts_with(c) {
            marker.push(c);
            return if marker == OPEN {
                let before = if after_call { String::new() } else { space };
                State::Head { before, body: String::new() }
            } else {
                State::Text { space, marker, after_call }
            };
        }
        if c.is_whitespace() {
            space.push(c);
            return State::Text { space, marker, after_call };
        }
        if !after_call {
            self.events.text(&space);
        }
        self.events.text(c.encode_utf8(&mut [0; 4]));
        State::text(false)
    }

    fn start_arguments(&mut self, name: String) -> State {
        let call = ToolCall { arguments: "{".into(), ..self.events.start_call(name) };
        self.events.arguments("{");
        State::Arguments { call, scan: JsonScan::opened() }
    }

    fn reread_as_body(before: String, body: String) -> State {
        let mut scan = body.trim_start().starts_with('{').then(JsonScan::default);
        let json_ended = scan.as_mut().is_some_and(|scan| body.chars().any(|c| scan.push(c)));
        State::Body { before, body, scan, json_ended }
    }

    fn step_body(
        &mut self,
        before: String,
        mut body: String,
        mut scan: Option<JsonScan>,
        mut json_ended: bool,
        c: char,
    ) -> State {
        body.push(c);
        let mut in_string = false;
        if let Some(scan) = &mut scan
            && !json_ended
        {
            json_ended = scan.push(c);
            in_string = scan.in_string();
        }
        // `CLOSE` within a string of the arguments does not end the call.
        if in_string || !body.ends_with(CLOSE) {
            return State::Body { before, body, scan, json_ended };
        }
        let inner = &body[..body.len() - CLOSE.len()];
        match read_body(inner) {
            Some((name, arguments)) => {
                let call = ToolCall { arguments, ..self.events.start_call(name) };
                self.events.arguments(&call.arguments);
                self.events.finish_call(call);
                State::text(true)
            }
            None => {
                self.markup_as_text(&before, &body);
                State::text(false)
            }
        }
    }

    fn markup_as_text(&mut self, before: &str, body: &str) {
        self.events.text(before);
        self.events.text(OPEN);
        self.events.text(body);
    }
}

enum Head {
    Partial,
    Complete(String),
    Other,
}

/// Parses `{"name": "…", "arguments": {` with any white space between.
fn read_head(body: &str) -> Head {
    if body.len() > MAX_HEAD_BYTES {
        return Head::Other;
    }
    let read = || {
        let (name, rest) = read_name(body)?;
        skip(rest, &[",", "\"arguments\"", ":", "{"])?;
        Ok(name)
    };
    match read() {
        Ok(name) => Head::Complete(name),
        Err(Unread::Partial) => Head::Partial,
        Err(Unread::Other) => Head::Other,
    }
}

/// Parses the name and arguments of a call in any order and spelling that models use.
fn read_body(body: &str) -> Option<(String, String)> {
    let Value::Object(call) = serde_json::from_str::<Value>(body.trim()).ok()? else { return None };
    let name = call.get("name")?.as_str()?.to_owned();
    let arguments = call.get("arguments").or_else(|| call.get("parameters"));
    let arguments = arguments.map_or_else(|| Some("{}".to_owned()), call_object::arguments)?;
    Some((name, arguments))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Returns the events with neighboring deltas joined and ids cleared, so that they can be compared.
    pub(in crate::chat) fn joined(pieces: &[&str], cut: bool) -> Vec<ParsedEvent> {
        let mut parser = ToolParser::new();
        let mut events: Vec<ParsedEvent> = pieces.iter().flat_map(|piece| parser.push(piece)).collect();
        events.extend(parser.finish(cut));
        let mut out: Vec<ParsedEvent> = Vec::new();
        for mut event in events {
            match (&mut event, out.last_mut()) {
                (ParsedEvent::CallStarted { id, .. }, _) => id.clear(),
                (ParsedEvent::CallFinished { call, .. }, _) => call.id.clear(),
                (ParsedEvent::Text(more), Some(ParsedEvent::Text(text))) => {
                    text.push_str(more);
                    continue;
                }
                (ParsedEvent::Arguments { delta: more, .. }, Some(ParsedEvent::Arguments { delta, .. })) => {
                    delta.push_str(more);
                    continue;
                }
                _ => {}
            }
            out.push(event);
        }
        out
    }

    fn summary(text: &str, cut: bool) -> (String, Vec<(String, String)>) {
        let (mut said, mut calls) = (String::new(), Vec::new());
        for event in joined(&[text], cut) {
            match event {
                ParsedEvent::Text(delta) => said.push_str(&delta),
                ParsedEvent::CallFinished { call, .. } => calls.push((call.name, call.arguments)),
                _ => {}
            }
        }
        (said, calls)
    }

    fn check(text: &str, cut: bool, said: &str, calls: &[(&str, &str)]) {
        let calls: Vec<_> = calls.iter().map(|(n, a)| (n.to_string(), a.to_string())).collect();
        assert_eq!(summary(text, cut), (said.to_string(), calls), "{text:?}");
    }

    const CALL: &str =
        "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}</tool_call>\\\"{\"}}\n</tool_call>";
    const ARGUMENTS: &str = "{\"a\": \"}</tool_call>\\\"{\"}";

    #[test]
    fn finds_calls_between_texts() {
        check("just text, a < b  \n", false, "just text, a < b  \n", &[]);
        check(CALL, false, "", &[("f", ARGUMENTS)]);
        check(
            &format!("Let me see.\n{CALL}\n{CALL}\n"),
            false,
            "Let me see.",
            &[("f", ARGUMENTS), ("f", ARGUMENTS)],
        );
        check(&format!("{CALL}\n\nDone."), false, "Done.", &[("f", ARGUMENTS)]);
        check("<<tool_call>{\"name\":\"g\",\"arguments\":{}}</tool_call>", false, "<", &[("g", "{}")]);
    }

    #[test]
    fn reads_calls_in_other_spellings() {
        check(
            "<tool_call>{\"arguments\": {\"a\":1}, \"name\": \"g\"}</tool_call>",
            false,
            "",
            &[("g", "{\"a\":1}")],
        );
        check("<tool_call>{\"name\": \"g\", \"parameters\": {}}</tool_call>", false, "", &[("g", "{}")]);
        check("<tool_call>{\"name\": \"g\"}</tool_call>", false, "", &[("g", "{}")]);
        check(
            "<tool_call>{\"name\": \"g\", \"arguments\": \"{\\\"a\\\":1}\"}</tool_call>",
            false,
            "",
            &[("g", "{\"a\":1}")],
        );
        check(
            "<tool_call>{\"name\": \"g\", \"arguments\": {}, \"id\": 7}</tool_call>",
            false,
            "",
            &[("g", "{}")],
        );
    }

    #[test]
    fn malformed_calls_are_text() {
        for text in [
            "<tool_call>no json</tool_call>",
            "<tool_call>{\"name\": 1}</tool_call>",
            "<tool_call>{\"nam\": \"x\", \"arguments\": {}}</tool_call>",
            "<tool_call>[1]</tool_call> and more",
            "<tool_call></tool_call>",
            "<tool_call>{\"name\": \"f\", \"arguments\": 3}</tool_call>",
        ] {
            check(text, false, text, &[]);
        }
    }

    #[test]
    fn a_call_that_was_cut_off_is_dropped() {
        let end = CALL.find("}}\n</tool_call>").unwrap();
        let named = CALL.find(", \"arguments\"").unwrap();
        for at in named..=end {
            check(&CALL[..at], true, "", &[]);
        }
        check("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": ", true, "", &[]);
        check("<tool_c", true, "<tool_c", &[]);
        check("<tool_call>{\"na", false, "<tool_call>{\"na", &[]);
        // Only the closing marker is missing; the arguments are complete.
        check(&CALL[..end + 2], true, "", &[("f", ARGUMENTS)]);
    }

    #[test]
    fn a_beginning_without_a_name_is_text() {
        let named = CALL.find(", \"arguments\"").unwrap();
        for at in "<tool_call>".len()..named {
            check(&CALL[..at], true, &CALL[..at], &[]);
        }
        for text in
            ["Calls begin with <tool_call>", "The tag <tool_call> begins", "<tool_call>{\"answer\": 4"]
        {
            check(text, true, text, &[]);
            check(text, false, text, &[]);
        }
    }

    #[test]
    fn events_do_not_depend_on_chunks() {
        let texts = [
            format!("Grüße 🐝 < <tool <tool_call {CALL}\n{CALL}  and then"),
            format!("  \n{CALL} \n <tool_call>broken</tool_call>\n"),
            "<tool_call>{\"arguments\": {\"x\": \"</tool_call>\"}, \"name\": \"g\"}</tool_call>".to_string(),
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"ü".to_string(),
        ];
        for text in &texts {
            for cut in [false, true] {
                let whole = joined(&[text], cut);
                let places: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
                for &first in &places {
                    assert_eq!(joined(&[&text[..first], &text[first..]], cut), whole, "{text:?} at {first}");
                    for &second in places.iter().filter(|&&second| second >= first).step_by(7) {
                        let pieces = [&text[..first], &text[first..second], &text[second..]];
                        assert_eq!(joined(&pieces, cut), whole, "{text:?} at {first}, {second}");
                    }
                }
                let single: Vec<String> = text.chars().map(String::from).collect();
                let single: Vec<&str> = single.iter().map(String::as_str).collect();
                assert_eq!(joined(&single, cut), whole);
            }
        }
    }

    #[test]
    fn text_is_emitted_once_it_cannot_be_a_marker() {
        let mut parser = ToolParser::new();
        assert_eq!(parser.push("a <tool"), [ParsedEvent::Text("a".into())]);
        assert_eq!(parser.push("s> b"), [ParsedEvent::Text(" <tools> b".into())]);
        let events = parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {\"a");
        assert!(
            matches!(&events[..], [ParsedEvent::CallStarted { .. }, ParsedEvent::Arguments { delta, .. }] if delta == "{\"a")
        );
    }
}
