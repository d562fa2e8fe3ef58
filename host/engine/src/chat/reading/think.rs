//! Separates the reasoning at the beginning of an answer from what follows it.
//!
//! Invariant: only the reasoning at the beginning is separated; a tag inside the answer is text.

use crate::chat::parsed::{ParsedEvent, ParsedEvents};

/// The reader of reasoning between two tags.
pub(in crate::chat) struct ThinkReader {
    begin: &'static str,
    end: &'static str,
    /// Texts that begin a call, which ends a reasoning that has no end.
    interrupts: Vec<&'static str>,
    state: State,
    events: ParsedEvents,
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
        interrupts: Vec<&'static str>,
        is_open: bool,
    ) -> Self {
        let state = match is_open {
            true => State::Within { begun: false, held: String::new() },
            false => State::Before { held: String::new() },
        };
        ThinkReader { begin, end, interrupts, state, events: ParsedEvents::default() }
    }

    /// Makes the reader of a reasoning whose beginning is in the prompt, so that white space belongs to it.
    pub(in crate::chat) fn continued(mut self) -> Self {
        self.state = State::Within { begun: true, held: String::new() };
        self
    }

    pub(super) fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        for (at, c) in delta.char_indices() {
            if matches!(self.state, State::Over) {
                self.events.text(&delta[at..]);
                break;
            }
            self.step(c);
        }
        self.events.take()
    }

    pub(super) fn finish(&mut self) -> Vec<ParsedEvent> {
        match std::mem::replace(&mut self.state, State::Over) {
            State::Before { held } => self.events.text(&held),
            State::Within { held, .. } => {
                let held = held.trim_end().to_owned();
                self.events.reasoning(&held);
            }
            State::Behind | State::Over => {}
        }
        self.events.take()
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
                    self.events.text(&held);
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
                    self.events.reasoning(&said);
                    State::Behind
                } else if let Some(open) = self.interrupts.iter().find(|open| held.ends_with(**open)) {
                    let said = held[..held.len() - open.len()].trim_end().to_owned();
                    self.events.reasoning(&said);
                    self.events.text(open);
                    State::Over
                } else {
                    let sure = self.sure_bytes(&held);
                    if sure > 0 {
                        let said: String = held.drain(..sure).collect();
                        self.events.reasoning(&said);
                        begun = true;
                    }
                    State::Within { begun, held }
                }
            }
            State::Behind if c.is_whitespace() => State::Behind,
            State::Behind | State::Over => {
                self.events.text(c.encode_utf8(&mut [0; 4]));
                State::Over
            }
        };
    }

    /// Returns how much of a text is neither the beginning of a tag nor white space before one.
    fn sure_bytes(&self, held: &str) -> usize {
        let tags = || std::iter::once(&self.end).chain(&self.interrupts);
        let begins_tag = |at: usize| tags().any(|tag| tag.starts_with(&held[at..]));
        let tag = held.char_indices().map(|(at, _)| at).find(|at| begins_tag(*at)).unwrap_or(held.len());
        held[..tag].trim_end().len()
    }
}
