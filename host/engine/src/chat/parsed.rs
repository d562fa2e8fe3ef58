//! The parts of an answer that readers find in its text: reasoning, text and calls.

use super::message::ToolCall;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum ParsedEvent {
    Text(String),
    /// Reasoning, which only readers of whole answers find.
    Reasoning(String),
    CallStarted {
        index: usize,
        id: String,
        name: String,
    },
    Arguments {
        index: usize,
        delta: String,
    },
    CallFinished {
        index: usize,
        call: ToolCall,
    },
}

/// Events that are collected until they are taken. A delta extends the one before it if both are of one kind.
#[derive(Default)]
pub(super) struct ParsedEvents {
    events: Vec<ParsedEvent>,
    /// Number of calls that have been started.
    started: usize,
}

impl ParsedEvents {
    pub(super) fn take(&mut self) -> Vec<ParsedEvent> {
        std::mem::take(&mut self.events)
    }

    pub(super) fn text(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ParsedEvent::Text(delta)) => delta.push_str(text),
            _ => self.events.push(ParsedEvent::Text(text.to_owned())),
        }
    }

    pub(super) fn reasoning(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ParsedEvent::Reasoning(delta)) => delta.push_str(text),
            _ => self.events.push(ParsedEvent::Reasoning(text.to_owned())),
        }
    }

    /// Starts a call and returns it without arguments.
    pub(super) fn start_call(&mut self, name: String) -> ToolCall {
        let call = ToolCall { id: ToolCall::mint_id(), name, arguments: String::new() };
        let (index, id, name) = (self.started, call.id.clone(), call.name.clone());
        self.events.push(ParsedEvent::CallStarted { index, id, name });
        self.started += 1;
        call
    }

    /// Adds arguments of the call that was started last.
    pub(super) fn arguments(&mut self, text: &str) {
        match self.events.last_mut() {
            _ if text.is_empty() => {}
            Some(ParsedEvent::Arguments { delta, .. }) => delta.push_str(text),
            _ => self.events.push(ParsedEvent::Arguments { index: self.started - 1, delta: text.to_owned() }),
        }
    }

    /// Finishes the call that was started last.
    pub(super) fn finish_call(&mut self, call: ToolCall) {
        self.events.push(ParsedEvent::CallFinished { index: self.started - 1, call });
    }
}
