//! The event stream of a turn.

use std::collections::VecDeque;

use anyhow::{Context as _, Result, anyhow, bail};
use skep_api::{ErrorBody, Turn, TurnEvent};

use crate::failure::Refused;

/// A host's events are far smaller; a larger one means that something else answers.
const MAX_EVENT_BYTES: usize = 64 << 20;

/// The events of a running turn.
pub struct TurnStream {
    response: reqwest::Response,
    parser: EventParser,
    ended: bool,
    turn: StreamedTurn,
}

/// Identifies a turn whose stream may break off, so that it can be found again.
pub(super) struct StreamedTurn {
    pub agent: String,
    pub session: String,
    /// `None` until the host has reported it.
    pub id: Option<String>,
}

impl StreamedTurn {
    fn broke_off(&self, how: &str) -> anyhow::Error {
        let Self { agent, session, id } = self;
        let hint = match id {
            Some(id) => {
                format!(
                    "run `skep turn {agent} {session} {id}` to see its result, once the host is reachable"
                )
            }
            None => "the host did not report the turn's id; send the message again".to_owned(),
        };
        anyhow!("{how}\n  hint: {hint}")
    }
}

impl TurnStream {
    /// Reads the events of a response to a streamed turn.
    pub(super) fn new(response: reqwest::Response, turn: StreamedTurn) -> Self {
        Self { response, parser: EventParser::default(), ended: false, turn }
    }

    /// Returns the next event; `None` after the last one. A turn that fails ends with the host's error.
    pub async fn next(&mut self) -> Result<Option<TurnEvent>> {
        loop {
            if let Some((name, data)) = self.parser.pop() {
                if let Some(event) = read(&name, &data)? {
                    self.ended |= matches!(event, TurnEvent::Done(_));
                    if let TurnEvent::Turn(started) = &event {
                        self.turn.id = Some(started.turn_id.clone());
                    }
                    return Ok(Some(event));
                }
                continue;
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.parser.push(&chunk)?,
                Ok(None) if self.ended => return Ok(None),
                Ok(None) => {
                    return Err(self.turn.broke_off("the host ended the stream before the turn was done"));
                }
                Err(_) => return Err(self.turn.broke_off("the connection ended before the turn was done")),
            }
        }
    }

    /// Waits until the turn is done and returns its whole answer.
    pub async fn answer(mut self) -> Result<Turn> {
        let mut done = None;
        while let Some(event) = self.next().await? {
            if let TurnEvent::Done(turn) = event {
                done = Some(turn);
            }
        }
        done.context("the stream ended without an answer")
    }
}

fn read(name: &str, data: &str) -> Result<Option<TurnEvent>> {
    // A newer host may send events that this client does not know.
    let event = TurnEvent::from_parts(name, data)
        .with_context(|| format!("the event {name:?} has a format that this `skep` does not know"))?;
    match event {
        Some(TurnEvent::Error(ErrorBody { error })) => {
            bail!(Refused { code: error.code, message: error.message })
        }
        event => Ok(event),
    }
}

/// Splits bytes into events, regardless of how they are cut into chunks.
#[derive(Default)]
pub(super) struct EventParser {
    line: Vec<u8>,
    name: String,
    data: String,
    /// The id of the event that arrives.
    id: Option<i64>,
    ready: VecDeque<(Option<i64>, String, String)>,
    /// The id of the last event that was taken, if it had one.
    last_id: Option<i64>,
}

impl EventParser {
    /// Adds bytes of the response, and queues the events that they complete.
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
            bail!("received an event of more than {MAX_EVENT_BYTES} bytes; is this a Skep host?");
        }
        Ok(())
    }

    fn take(&mut self, line: &str) {
        if line.is_empty() {
            if !self.data.is_empty() {
                let (name, data) = (std::mem::take(&mut self.name), std::mem::take(&mut self.data));
                self.ready.push_back((self.id, name, data));
            }
            self.name.clear();
            self.id = None;
        } else if let Some(name) = line.strip_prefix("event:") {
            self.name = name.trim_start().to_owned();
        } else if let Some(data) = line.strip_prefix("data:") {
            if !self.data.is_empty() {
                self.data.push('\n');
            }
            self.data.push_str(data.strip_prefix(' ').unwrap_or(data));
        } else if let Some(id) = line.strip_prefix("id:") {
            self.id = id.trim().parse().ok();
        }
    }

    /// Returns the next whole event: its name and its data.
    pub(super) fn pop(&mut self) -> Option<(String, String)> {
        let (id, name, data) = self.ready.pop_front()?;
        self.last_id = id;
        Some((name, data))
    }

    /// Returns the id of the last event, if it is a number.
    pub(super) fn last_id(&self) -> Option<i64> {
        self.last_id
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

    /// Returns the error of a client whose host sends `answer` to its message and closes the connection.
    async fn reported_for(answer: &'static str) -> String {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let url = format!("http://{}", listener.local_addr().expect("an address"));
        let host = tokio::spawn(async move {
            let (mut connection, _) = listener.accept().await.expect("a client");
            let mut request = Vec::new();
            while !request.ends_with(b"}") {
                connection.read_buf(&mut request).await.expect("a request");
            }
            connection.write_all(answer.as_bytes()).await.expect("the client reads");
        });
        let client = crate::client::Client::new(Some(&url)).expect("an address");
        let answered = async { client.stream("desk", "raum-ä", "hi").await?.answer().await };
        let error = answered.await.expect_err("no whole answer");
        host.await.expect("it answered");
        format!("{error:#}")
    }

    #[tokio::test]
    async fn a_client_that_loses_its_host_learns_how_to_find_its_turn() {
        let head = "HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
        let told = reported_for(head).await;
        assert!(told.contains("hint: the host did not report the turn's id"), "{told}");
        let told = reported_for(concat!(
            "HTTP/1.1 200 OK\r\ncontent-length: 999\r\n\r\n",
            "event: turn\ndata: {\"turn\":1,\"turn_id\":\"t1\"}\n\n"
        ))
        .await;
        assert!(told.starts_with("the connection ended before the turn was done"), "{told}");
        assert!(told.contains("hint: run `skep turn desk raum-ä t1`"), "{told}");
        let told = reported_for("").await;
        assert!(told.starts_with("the host did not answer") && !told.contains("%C3%A4"), "{told}");
    }

    #[test]
    fn error_event_is_the_hosts_refusal() {
        let data = r#"{"error":{"message":"too much","type":"x","param":null,"code":"limit_exceeded"}}"#;
        let error = read("error", data).expect_err("an error");
        assert_eq!(error.to_string(), "too much (limit_exceeded)");
        assert!(read("something_new", "{}").expect("ignored").is_none());
    }
}
