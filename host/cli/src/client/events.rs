//! The event stream of a turn, read as it comes.

use std::collections::VecDeque;

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use super::wire::{ErrorBody, Timing, Turn, TurnEvent, Usage};
use crate::failure::Refused;

/// A host's event is far smaller; more means that something else answers.
const MAX_EVENT_BYTES: usize = 64 << 20;

/// The events of a turn that runs.
pub struct TurnStream {
    response: reqwest::Response,
    parser: EventParser,
    ended: bool,
}

impl TurnStream {
    pub(super) fn new(response: reqwest::Response) -> Self {
        Self { response, parser: EventParser::default(), ended: false }
    }

    /// The next event; `None` after the last. A turn that fails ends with the host's error.
    pub async fn next(&mut self) -> Result<Option<TurnEvent>> {
        loop {
            if let Some((name, data)) = self.parser.pop() {
                if let Some(event) = read(&name, &data)? {
                    self.ended |= matches!(event, TurnEvent::Done(_));
                    return Ok(Some(event));
                }
                continue;
            }
            match self.response.chunk().await.context("the event stream broke off")? {
                Some(chunk) => self.parser.push(&chunk)?,
                None if self.ended => return Ok(None),
                None => bail!("the host ended the stream before the turn was done"),
            }
        }
    }
}

fn read(name: &str, data: &str) -> Result<Option<TurnEvent>> {
    #[derive(Deserialize)]
    struct Delta {
        text: String,
    }
    #[derive(Deserialize)]
    struct Generation {
        usage: Usage,
        timing: Timing,
    }
    let event = match name {
        "turn" => Ok(TurnEvent::Started),
        "delta" => serde_json::from_str(data).map(|delta: Delta| TurnEvent::Delta(delta.text)),
        "tool_call" => serde_json::from_str(data).map(TurnEvent::ToolCall),
        "tool_result" => serde_json::from_str(data).map(TurnEvent::ToolResult),
        "usage" => serde_json::from_str(data)
            .map(|Generation { usage, timing }| TurnEvent::Generation { usage, timing }),
        "done" => serde_json::from_str::<Turn>(data).map(TurnEvent::Done),
        "error" => {
            let body: ErrorBody = serde_json::from_str(data).context("an error event without an error")?;
            bail!(Refused { code: body.error.code, message: body.error.message });
        }
        // A later host may say more than this client knows.
        _ => return Ok(None),
    };
    event.map(Some).with_context(|| format!("the event {name:?} has a form that this `skep` does not know"))
}

/// Splits bytes into events, however they are cut into chunks.
#[derive(Default)]
pub(super) struct EventParser {
    line: Vec<u8>,
    name: String,
    data: String,
    ready: VecDeque<(String, String)>,
}

impl EventParser {
    pub(super) fn push(&mut self, bytes: &[u8]) -> Result<()> {
        for &byte in bytes {
            if byte != b'\n' {
                self.line.push(byte);
                continue;
            }
            let line = String::from_utf8_lossy(&self.line).trim_end_matches('\r').to_owned();
            self.line.clear();
            self.take(&line);
        }
        if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
            bail!("an event of more than {MAX_EVENT_BYTES} bytes; is this a Skep host?");
        }
        Ok(())
    }

    fn take(&mut self, line: &str) {
        if line.is_empty() {
            if !self.data.is_empty() {
                self.ready.push_back((std::mem::take(&mut self.name), std::mem::take(&mut self.data)));
            }
            self.name.clear();
        } else if let Some(name) = line.strip_prefix("event:") {
            self.name = name.trim_start().to_owned();
        } else if let Some(data) = line.strip_prefix("data:") {
            if !self.data.is_empty() {
                self.data.push('\n');
            }
            self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
        }
    }

    /// The next whole event: its name and its data.
    pub(super) fn pop(&mut self) -> Option<(String, String)> {
        self.ready.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_however_the_bytes_are_cut() {
        let body =
            ": keep-alive\n\nevent: delta\ndata: {\"text\":\"Grüße\"}\n\nevent: done\r\ndata: 1\r\n\r\n";
        let whole =
            [("delta".to_owned(), "{\"text\":\"Grüße\"}".to_owned()), ("done".to_owned(), "1".to_owned())];
        for size in 1..body.len() {
            let mut parser = EventParser::default();
            for chunk in body.as_bytes().chunks(size) {
                parser.push(chunk).expect("small events");
            }
            let events: Vec<_> = std::iter::from_fn(|| parser.pop()).collect();
            assert_eq!(events, whole, "chunks of {size}");
        }
    }

    #[test]
    fn error_event_is_the_hosts_refusal() {
        let data = r#"{"error":{"message":"too much","type":"x","param":null,"code":"limit_exceeded"}}"#;
        let error = read("error", data).expect_err("an error");
        assert_eq!(error.to_string(), "too much (limit_exceeded)");
        assert!(read("something_new", "{}").expect("ignored").is_none());
    }
}
