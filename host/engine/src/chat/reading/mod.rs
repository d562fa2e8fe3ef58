//! Reads an answer while it is generated: reasoning, text and calls, in the markup of the model.
//!
//! Invariant: readers move one character at a time, so the events, with neighboring deltas joined, are the same however
//! the text was cut into chunks. Text that is neither reasoning nor a call is text, markup included; only white space
//! next to reasoning and calls is dropped.

mod calls;
#[cfg(test)]
mod conservation_tests;
mod harmony;
mod heads;
mod parameters;
#[cfg(test)]
mod tests;
mod think;

use skep_model::Tokenizer;

use super::dialect::Dialect;
use super::markup::Reading;
#[cfg(any(test, feature = "fuzz"))]
use super::message::ToolSpec;
use super::options::ChatOptions;
use super::parsed::ParsedEvent;
use super::prompt::Prompt;
use super::tool_parser::ToolParser;
use calls::CallReader;
use harmony::HarmonyReader;
pub(super) use think::ThinkReader;

/// The reader of one answer.
pub(super) struct AnswerReader {
    think: Option<ThinkReader>,
    calls: Calls,
}

/// The search for calls.
enum Calls {
    /// Everything is text.
    None,
    Hermes(ToolParser),
    Marked(Box<CallReader>),
    Harmony(Box<HarmonyReader>),
}

impl AnswerReader {
    /// Creates the reader of an answer to a prompt.
    pub(super) fn new(
        dialect: &Dialect,
        prompt: &Prompt,
        tokenizer: &Tokenizer,
        options: &ChatOptions,
    ) -> Self {
        let tools = options.calls_tools().then_some(options.tools.as_slice());
        let calls = match (&dialect.markup.reading, tools) {
            (Reading::Harmony, tools) => Calls::Harmony(Box::new(HarmonyReader::new(tools.is_some()))),
            (_, None) => Calls::None,
            (Reading::Hermes, Some(_)) => Calls::Hermes(ToolParser::new()),
            (Reading::Calls(reading), Some(tools)) => {
                Calls::Marked(Box::new(CallReader::new(reading, tools)))
            }
        };
        AnswerReader { think: dialect.think_reader(prompt, tokenizer, options), calls }
    }

    /// Creates a reader of calls in Hermes' markup alone.
    #[cfg(feature = "fuzz")]
    pub(super) fn for_hermes() -> Self {
        AnswerReader { think: None, calls: Calls::Hermes(ToolParser::new()) }
    }

    /// Creates a reader for the markup with this name.
    #[cfg(any(test, feature = "fuzz"))]
    pub(super) fn for_markup(
        name: &str,
        tags: Option<(&'static str, &'static str)>,
        tools: &[ToolSpec],
    ) -> Self {
        use super::markup::Markup;
        let (think, calls) = match &Markup::named(name).expect("a known markup").reading {
            Reading::Hermes => (tags, Calls::Hermes(ToolParser::new())),
            Reading::Harmony => (None, Calls::Harmony(Box::new(HarmonyReader::new(true)))),
            Reading::Calls(reading) => (tags, Calls::Marked(Box::new(CallReader::new(reading, tools)))),
        };
        AnswerReader { think: think.map(|tags| ThinkReader::new(tags, Vec::new(), false)), calls }
    }

    /// Returns whether every text passes through unchanged and at once.
    pub(super) fn is_plain(&self) -> bool {
        self.think.is_none() && matches!(self.calls, Calls::None)
    }

    /// Takes the next chunk of text and returns the events that it completed.
    pub(super) fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        match &mut self.think {
            None => self.calls.push(delta),
            Some(think) => {
                let events = think.push(delta);
                self.after_thinking(events)
            }
        }
    }

    /// Ends the text. `cut` says that a limit or a stop string ended it, not the model.
    pub(super) fn finish(&mut self, cut: bool) -> Vec<ParsedEvent> {
        let rest = self.think.as_mut().map_or_else(Vec::new, ThinkReader::finish);
        let mut events = self.after_thinking(rest);
        events.extend(self.calls.finish(cut));
        events
    }

    /// Returns whether a call has started whose arguments are not complete.
    pub(super) fn is_in_call(&self) -> bool {
        match &self.calls {
            Calls::None => false,
            Calls::Hermes(parser) => parser.is_in_call(),
            Calls::Marked(reader) => reader.is_in_call(),
            Calls::Harmony(reader) => reader.is_in_call(),
        }
    }

    fn after_thinking(&mut self, events: Vec<ParsedEvent>) -> Vec<ParsedEvent> {
        let mut out = Vec::new();
        for event in events {
            match event {
                ParsedEvent::Text(text) => out.extend(self.calls.push(&text)),
                event => out.push(event),
            }
        }
        out
    }
}

impl Calls {
    fn push(&mut self, delta: &str) -> Vec<ParsedEvent> {
        match self {
            Calls::None => vec![ParsedEvent::Text(delta.to_owned())],
            Calls::Hermes(parser) => parser.push(delta),
            Calls::Marked(reader) => reader.push(delta),
            Calls::Harmony(reader) => reader.push(delta),
        }
    }

    fn finish(&mut self, cut: bool) -> Vec<ParsedEvent> {
        match self {
            Calls::None => Vec::new(),
            Calls::Hermes(parser) => parser.finish(cut),
            Calls::Marked(reader) => reader.finish(cut),
            Calls::Harmony(reader) => reader.finish(cut),
        }
    }
}
