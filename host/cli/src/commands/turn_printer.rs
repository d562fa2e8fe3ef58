//! Prints a turn while it runs: the text as it streams, tool calls with their arguments and results, and the
//! figures.

use anyhow::Result;
use serde_json::Value;
use skep_api::{Delta, Generation, ModelChanged, Timing, ToolCall, Turn, TurnEvent, Usage};

use super::out;
use crate::client::TurnStream;
use crate::style::{self, Painter};

/// Result of a turn.
pub struct TurnReport {
    pub turn: Turn,
    pub generations: Vec<(Usage, Timing)>,
    pub tool_calls: Vec<ToolCall>,
}

/// Prints the events of `stream` until the turn is done.
pub async fn show(stream: &mut TurnStream) -> Result<TurnReport> {
    let mut printer = Printer { paint: style::stdout(), streamed: String::new(), at_line_start: true };
    let (mut generations, mut tool_calls, mut done) = (Vec::new(), Vec::new(), None);
    while let Some(event) = stream.next().await? {
        match event {
            TurnEvent::Delta(Delta { text }) => printer.text(&text)?,
            TurnEvent::ToolCall(call) => printer.aside(&format!("→ {}({})", call.name, call.arguments))?,
            TurnEvent::ToolResult(call) => {
                let shown = match (&call.result, &call.error) {
                    (Some(result), _) => result.to_string(),
                    (None, Some(error)) => format!("error: {error}"),
                    (None, None) => "nothing".to_owned(),
                };
                printer.aside(&format!("← {shown}"))?;
                let (id, name, result, error) = (call.id, call.name, call.result, call.error);
                tool_calls.push(ToolCall { id, name, arguments: Value::Null, result, error });
            }
            TurnEvent::ModelChanged(ModelChanged { conversation, from, to }) => {
                let with = if from == to {
                    format!("another model named {to}")
                } else {
                    format!("{to} instead of {from}")
                };
                printer.aside(&format!("conversation {conversation} continues with {with}"))?;
            }
            TurnEvent::GenerationRestarted(_) => {
                printer.aside("the answer was cut off, and begins again")?;
                printer.streamed.clear();
            }
            TurnEvent::Usage(Generation { usage, timing }) => generations.push((usage, timing)),
            TurnEvent::Done(turn) => done = Some(turn),
            TurnEvent::Turn(_)
            | TurnEvent::ModelChosen(_)
            | TurnEvent::Thinking(_)
            | TurnEvent::ApprovalRequired(_)
            | TurnEvent::ApprovalDecided(_)
            | TurnEvent::Error(_) => {}
        }
    }
    let turn = done.ok_or_else(|| anyhow::anyhow!("the stream ended without an answer"))?;
    // The answer is the text that the agent returned: an agent may add to what was streamed, or replace it.
    match turn.text.trim().strip_prefix(printer.streamed.trim()) {
        Some(added) => printer.text(added)?,
        None => {
            printer.end_line()?;
            printer.text(turn.text.trim())?;
        }
    }
    printer.end_line()?;
    // The stream reports only outcomes; the whole answer has the arguments too.
    for call in &mut tool_calls {
        if let Some(full) = turn.tool_calls.iter().find(|full| full.id == call.id) {
            call.arguments = full.arguments.clone();
        }
    }
    Ok(TurnReport { turn, generations, tool_calls })
}

impl TurnReport {
    /// Returns the number of prompt tokens that the first generation did not have to compute.
    pub fn first_cached_tokens(&self) -> u64 {
        self.generations.first().map_or(0, |(usage, _)| usage.prompt_tokens_details.cached_tokens)
    }

    /// Returns the tokens per second while tokens came, over all generations.
    pub fn tokens_per_s(&self) -> Option<f64> {
        let tokens: u64 =
            self.generations.iter().map(|(usage, _)| usage.completion_tokens.saturating_sub(1)).sum();
        let ms: f64 =
            self.generations.iter().map(|(_, timing)| timing.total_ms - timing.first_token_ms).sum();
        (tokens > 0 && ms > 0.0).then(|| tokens as f64 / ms * 1000.0)
    }

    /// Returns the figures as one line.
    pub fn figures(&self) -> String {
        let usage = &self.turn.usage;
        let mut parts = Vec::new();
        if let Some(first) = self.turn.timing.first_token_ms {
            parts.push(format!("first token {first:.0} ms"));
        }
        if let Some(rate) = self.tokens_per_s() {
            parts.push(format!("{rate:.0} tok/s"));
        }
        let cached = usage.prompt_tokens_details.cached_tokens;
        parts.push(format!("prompt {} tokens, {cached} of them cached", usage.prompt_tokens));
        parts.push(format!("{} generated", usage.completion_tokens));
        parts.push(format!("turn {:.2} s", self.turn.timing.total_ms / 1000.0));
        parts.join(" · ")
    }
}

struct Printer {
    paint: Painter,
    /// Text since the last tool call.
    streamed: String,
    at_line_start: bool,
}

impl Printer {
    fn text(&mut self, text: &str) -> Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.streamed.push_str(text);
        self.at_line_start = text.ends_with('\n');
        out::piece(text)
    }

    fn aside(&mut self, text: &str) -> Result<()> {
        self.end_line()?;
        self.streamed.clear();
        out::line(&format!("  {}", self.paint.cyan(text)))
    }

    fn end_line(&mut self) -> Result<()> {
        if !self.at_line_start {
            self.at_line_start = true;
            out::line("")?;
        }
        Ok(())
    }
}
