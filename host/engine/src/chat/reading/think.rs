//! Tells the reasoning at the beginning of an answer from what follows it.
//!
//! Invariant: only the first reasoning is told apart; a tag that the answer itself contains is text.

use crate::chat::tool_parser::ParsedEvent;

/// The reader of reasoning between two tags.
pub(in crate::chat) struct ThinkReader {
    begin: &'static str,
    end: &'static str,
    /// Texts that begin a call, which ends a reasoning that has no end.
    interrupts: &'static [&'static str],
    state: State,
    events: Vec<ParsedEvent>,
}

enum State {
    /// Only white space and a beginning of the opening tag so far.
    Before {
        held: String,
    },
    /// `begun` says that the reasoning has text, and `held` is white space or the beginning of a tag.
    Within {
        begun: bool,
        held: String,
    },
    /// White space after the reasoning is dropped.
    Behind,
    Over,
}

impl ThinkReader {
    /// Creates a reader. `is_open` says that the prompt ends within the reasoning.
    pub(in crate::chat) fn new(
        (begin, end): (&'static str, &'static str),
        interrupts: &'static [&'static str],
        is_open: bool,
    ) -> Self {
        let state = match is_open {
            true => State::Within { begun: false, held: String::new() },
            false => State::Before { held: String::new() },
        };
        ThinkReader { begin, end, interrupts, state, events: Vec::new() }
    }

    pub(super) fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        for (at, c) in delta.char_indices() {
            if matches!(self.state, State::Over) {
                self.text(&delta[at..]);
                break;
            }
            self.step(c);
        }
        std::mem::take(&mut self.events)
    }

    pub(super) fn finish(&mut self) -> Vec<ParsedEvent> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Before { held } => self.text(&held),
            State::Within { held, .. } => {
                let held = held.trim_end().to_owned();
                self.reasoning(&held);
            }
            State::Behind | State::Over => {}
        }
        std::mem::take(&mut self.events)
    }

    fn step(&mut self, c: char) {
        self.state = match std::mem::replace(&mut self.state, State::Over) {
            State::Before { mut held } => {
                held.push(c);
                let tag = held.trim_start();
                if tag == self.begin {
                    State::Within { begun: false, held: String::new() }
                } else if self.begin.starts_with(tag) {
                    State::Before { held }
                } else {
                    self.text(&held);
                    State::Over
                }
            }
            State::Within { mut begun, mut held } => {
                held.push(c);
                if !begun && held.trim().is_empty() {
                    held.clear();
                }
                if held.ends_with(self.end) {
                    let said = held[..held.len() - self.end.len()].trim_end().to_owned();
                    self.reasoning(&said);
                    State::Behind
                } else if let Some(open) = self.interrupts.iter().find(|open| held.ends_with(**open)) {
                    let said = held[..held.len() - open.len()].trim_end().to_owned();
                    self.reasoning(&said);
                    self.text(open);
                    State::Over
                } else {
                    let sure = self.sure_bytes(&held);
                    if sure > 0 {
                        let said: String = held.drain(..sure).collect();
                        self.reasoning(&said);
                        begun = true;
                    }
                    State::Within { begun, held }
                }
            }
            State::Behind if c.is_whitespace() => State::Behind,
            State::Behind | State::Over => {
                self.text(c.encode_utf8(&mut [0; 4]));
                State::Over
            }
        };
    }

    /// Returns how much of a text is neither the beginning of a tag nor white space before one.
    fn sure_bytes(&self, held: &str) -> usize {
        let tags = || std::iter::once(&self.end).chain(self.interrupts);
        let begins_tag = |at: usize| tags().any(|tag| tag.starts_with(&held[at..]));
        let tag = held.char_indices().map(|(at, _)| at).find(|at| begins_tag(*at)).unwrap_or(held.len());
        held[..tag].trim_end().len()
    }

    fn text(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ParsedEvent::Text(delta)) => delta.push_str(text),
            _ => self.events.push(ParsedEvent::Text(text.to_owned())),
        }
    }

    fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ParsedEvent::Reasoning(delta)) => delta.push_str(text),
            _ => self.events.push(ParsedEvent::Reasoning(text.to_owned())),
        }
    }
}
