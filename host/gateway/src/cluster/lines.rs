//! The events of a turn between two hosts: lines of JSON, with the turn's id in the first one.
//!
//! A line comes at least every ten seconds, so a reader knows that a silent writer is gone.

use axum::body::{Body, BodyDataStream, Bytes};
use futures::{Stream, StreamExt, stream};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use skep_runtime::{Outcome, PeerError, RemoteEvent, RemoteRun, RunEvent, RunHandle};
use std::{convert::Infallible, time::Duration};

/// Longest time between two lines of a writer.
const KEEP_ALIVE: Duration = Duration::from_secs(10);
/// Time after which a silent writer counts as gone.
const SILENCE: Duration = Duration::from_secs(30);
/// Maximum size of a line. The results of agents have limits of their own, far below it.
const MAX_LINE_BYTES: usize = 256 << 20;

/// A line as it is written. A reader skips lines that it does not know, which a newer host may write. Two lines are written under the
/// names that earlier hosts know.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Turn {
        id: String,
    },
    Event {
        id: u64,
        event: RunEvent,
    },
    #[serde(rename = "parked")]
    Suspended {
        approval: String,
    },
    #[serde(rename = "unparked")]
    Resumed {},
    Ended {
        id: u64,
        outcome: Outcome,
    },
    Failed {
        code: String,
        message: String,
        retry_after_ms: Option<u32>,
    },
    Alive {},
}

/// Returns the body that writes the events of a turn. Dropping it drops the handle of the turn.
pub(super) fn write(turn_id: String, run: RunHandle) -> Body {
    let events = stream::unfold(run, |mut run| async move {
        let event = run.next_remote().await?;
        Some((event, run))
    });
    let lines = lines(turn_id, events.boxed(), KEEP_ALIVE);
    Body::from_stream(lines.map(|line| Ok::<_, Infallible>(text(&line))))
}

/// Returns the lines of a turn with these events.
fn lines(
    turn_id: String,
    events: impl Stream<Item = RemoteEvent> + Send + Unpin + 'static,
    keep_alive: Duration,
) -> impl Stream<Item = Line> + Send + 'static {
    let first = stream::iter([Line::Turn { id: turn_id }]);
    first.chain(stream::unfold(events, move |mut events| async move {
        // The stream keeps its place when the wait for its next event is given up.
        match tokio::time::timeout(keep_alive, events.next()).await {
            Ok(event) => Some((Line::of(event?), events)),
            Err(_) => Some((Line::Alive {}, events)),
        }
    }))
}

/// Reads the beginning of what another host has written, up to the id of the turn.
pub(super) async fn read(body: Body) -> Result<RemoteRun, PeerError> {
    read_within(body, SILENCE).await
}

async fn read_within(body: Body, silence: Duration) -> Result<RemoteRun, PeerError> {
    let mut reader = Reader::new(body, silence);
    match reader.next::<Line>().await {
        Some(Ok(Line::Turn { id })) => Ok(RemoteRun { turn_id: id, events: Box::pin(events(reader)) }),
        Some(Ok(_)) => Err(broken("the first line is not the id of the turn")),
        Some(Err(error)) => Err(error),
        None => Err(broken("the answer is empty")),
    }
}

/// Returns the events after the first line. An error is the last item.
fn events(reader: Reader) -> impl Stream<Item = Result<RemoteEvent, PeerError>> + Send + 'static {
    stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        loop {
            match reader.next::<Line>().await {
                Some(Ok(line)) => {
                    if let Some(event) = line.event() {
                        return Some((Ok(event), Some(reader)));
                    }
                }
                Some(Err(error)) => return Some((Err(error), None)),
                None => return None,
            }
        }
    })
}

impl Line {
    fn of(event: RemoteEvent) -> Self {
        match event {
            RemoteEvent::Event { id, event } => Line::Event { id, event },
            RemoteEvent::Suspended { approval } => Line::Suspended { approval },
            RemoteEvent::Resumed => Line::Resumed {},
            RemoteEvent::Ended { id, outcome } => Line::Ended { id, outcome },
            RemoteEvent::Failed { code, message, retry_after_ms } => {
                Line::Failed { code, message, retry_after_ms }
            }
        }
    }

    /// Returns the event of the line, if it has one.
    fn event(self) -> Option<RemoteEvent> {
        Some(match self {
            Line::Event { id, event } => RemoteEvent::Event { id, event },
            Line::Suspended { approval } => RemoteEvent::Suspended { approval },
            Line::Resumed {} => RemoteEvent::Resumed,
            Line::Ended { id, outcome } => RemoteEvent::Ended { id, outcome },
            Line::Failed { code, message, retry_after_ms } => {
                RemoteEvent::Failed { code, message, retry_after_ms }
            }
            Line::Turn { .. } | Line::Alive {} => return None,
        })
    }
}

fn text(line: &Line) -> Bytes {
    let mut text = serde_json::to_vec(line).expect("strings, numbers and JSON always serialize");
    text.push(b'\n');
    text.into()
}

/// Reads lines from a body.
pub(super) struct Reader {
    body: BodyDataStream,
    buffer: Vec<u8>,
    /// The number of bytes at the front of the buffer in which there is no end of a line.
    searched: usize,
    /// Time after which a silent writer counts as gone.
    silence: Duration,
}

impl Reader {
    /// Returns a reader to which a writer that is silent for this time is gone.
    pub(super) fn new(body: Body, silence: Duration) -> Self {
        Reader { body: body.into_data_stream(), buffer: Vec::new(), searched: 0, silence }
    }

    /// Returns the next line that this version knows. A body that ends within a line has broken off.
    pub(super) async fn next<L: DeserializeOwned>(&mut self) -> Option<Result<L, PeerError>> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|byte| *byte == b'\n') {
                let rest = self.buffer.split_off(self.searched + at + 1);
                let line = std::mem::replace(&mut self.buffer, rest);
                self.searched = 0;
                match parse(&line) {
                    Ok(Some(line)) => return Some(Ok(line)),
                    Ok(None) => continue,
                    Err(error) => return Some(Err(error)),
                }
            }
            self.searched = self.buffer.len();
            if self.searched > MAX_LINE_BYTES {
                return Some(Err(broken("a line is too long")));
            }
            match tokio::time::timeout(self.silence, self.body.next()).await {
                Ok(Some(Ok(bytes))) => self.buffer.extend_from_slice(&bytes),
                Ok(Some(Err(error))) => return Some(Err(broken(&error.to_string()))),
                Ok(None) if self.buffer.is_empty() => return None,
                Ok(None) => return Some(Err(broken("the answer ends within a line"))),
                Err(_) => return Some(Err(broken(&format!("the host was silent for {:?}", self.silence)))),
            }
        }
    }
}

/// Parses a line. Returns `None` if it is of a kind that this version does not know.
fn parse<L: DeserializeOwned>(line: &[u8]) -> Result<Option<L>, PeerError> {
    match serde_json::from_slice(line) {
        Ok(line) => Ok(Some(line)),
        Err(error) if error.is_data() && error.to_string().starts_with("unknown variant") => {
            tracing::debug!(%error, "a line of another host is skipped");
            Ok(None)
        }
        Err(error) => Err(broken(&format!("a line of the other host is not valid: {error}"))),
    }
}

fn broken(why: &str) -> PeerError {
    PeerError::Broken(why.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_runtime::{Json, Usage};

    fn outcome() -> Outcome {
        let data = Some(Json::from_text("{\"a\": [1.0, \"\\n\"]}".to_owned()).unwrap());
        Outcome { text: "two\nlines".to_owned(), data, turn: 3, usage: Usage::default(), elapsed_us: 5 }
    }

    async fn read_all(chunks: &[&'static str]) -> Vec<String> {
        let chunks = chunks.iter().map(|chunk| Ok::<_, Infallible>(Bytes::from_static(chunk.as_bytes())));
        let chunks = stream::iter(chunks.collect::<Vec<_>>());
        let run = match read(Body::from_stream(chunks)).await {
            Ok(run) => run,
            Err(error) => return vec![shown(&Err(error))],
        };
        let events: Vec<_> = run.events.collect().await;
        std::iter::once(run.turn_id).chain(events.iter().map(shown)).collect()
    }

    fn shown(event: &Result<RemoteEvent, PeerError>) -> String {
        match event {
            Ok(RemoteEvent::Event { id, event }) => format!("{id} {event:?}"),
            Ok(RemoteEvent::Suspended { approval }) => format!("suspended {approval}"),
            Ok(RemoteEvent::Resumed) => "resumed".to_owned(),
            Ok(RemoteEvent::Ended { id, outcome }) => format!("{id} ended {}", outcome.text),
            Ok(RemoteEvent::Failed { code, .. }) => format!("failed {code}"),
            Err(PeerError::Broken(why)) => format!("broken: {why}"),
            Err(_) => "another error".to_owned(),
        }
    }

    #[tokio::test]
    async fn every_event_arrives_as_it_was_sent() {
        let sent = [
            RemoteEvent::Event { id: 1, event: RunEvent::Delta { text: "a\nb".to_owned() } },
            RemoteEvent::Suspended { approval: "7".to_owned() },
            RemoteEvent::Resumed,
            RemoteEvent::Event { id: 2, event: RunEvent::Done(outcome()) },
            RemoteEvent::Failed { code: "busy".to_owned(), message: "m".to_owned(), retry_after_ms: Some(9) },
            RemoteEvent::Ended { id: 2, outcome: outcome() },
        ];
        let lines = lines("t".to_owned(), stream::iter(sent), KEEP_ALIVE);
        let written = lines.fold(Vec::new(), |mut all, line| async move {
            all.extend_from_slice(&text(&line));
            all
        });
        let written = written.await;
        // One byte at a time: the ends of chunks have nothing to do with those of lines.
        let chunks = written.into_iter().map(|byte| Ok::<_, Infallible>(Bytes::from(vec![byte])));
        let run = read(Body::from_stream(stream::iter(chunks))).await.unwrap_or_else(|_| panic!("readable"));
        assert_eq!(run.turn_id, "t");
        let events: Vec<_> = run.events.collect().await;
        let shown: Vec<String> = events.iter().map(shown).collect();
        let expected_done = format!("2 {:?}", RunEvent::Done(outcome()));
        assert_eq!(
            shown,
            [
                "1 Delta { text: \"a\\nb\" }",
                "suspended 7",
                "resumed",
                &expected_done,
                "failed busy",
                "2 ended two\nlines"
            ]
        );
        let Some(Ok(RemoteEvent::Failed { retry_after_ms, .. })) = events.get(4) else { panic!("{shown:?}") };
        assert_eq!(*retry_after_ms, Some(9));
        let Some(Ok(RemoteEvent::Ended { outcome: found, .. })) = events.get(5) else { panic!("{shown:?}") };
        assert_eq!(*found, outcome());
    }

    #[tokio::test]
    async fn a_turn_without_events_still_writes_lines() {
        let lines = lines("t".to_owned(), stream::pending(), Duration::from_millis(1));
        let written: Vec<Line> = lines.take(4).collect().await;
        assert!(
            matches!(&written[..], [Line::Turn { .. }, Line::Alive {}, Line::Alive {}, Line::Alive {}]),
            "{written:?}"
        );
    }

    #[tokio::test]
    async fn a_host_that_writes_nothing_is_gone() {
        let first = stream::iter([Ok::<_, Infallible>(Bytes::from_static(b"{\"turn\":{\"id\":\"t\"}}\n"))]);
        let body = Body::from_stream(first.chain(stream::pending()));
        let run = read_within(body, Duration::from_millis(5)).await.unwrap_or_else(|_| panic!("readable"));
        let events: Vec<_> = run.events.collect().await;
        assert_eq!(events.iter().map(shown).collect::<Vec<_>>(), ["broken: the host was silent for 5ms"]);
    }

    #[tokio::test]
    async fn lines_of_a_newer_host_are_skipped_and_others_break_the_run() {
        let turn = "{\"turn\":{\"id\":\"t\"}}\n";
        let newer = "{\"news\":{\"a\":1}}\n{\"alive\":{}}\n{\"unparked\":{}}\n";
        assert_eq!(read_all(&[turn, newer]).await, ["t", "resumed"]);
        let wrong = read_all(&[turn, "{\"event\":{\"id\":1}}\n", "{\"unparked\":{}}\n"]).await;
        assert!(wrong.len() == 2 && wrong[1].starts_with("broken: a line of the other host is not valid"));
        let broken_off = read_all(&[turn, "{\"unpar"]).await;
        assert_eq!(broken_off, ["t", "broken: the answer ends within a line"]);
        assert_eq!(read_all(&[]).await, ["broken: the answer is empty"]);
        let headless = read_all(&["{\"alive\":{}}\n"]).await;
        assert_eq!(headless, ["broken: the first line is not the id of the turn"]);
    }
}
