//! The answer of a generation between two hosts: lines of JSON, one for each event.
//!
//! A host that is silent for a while is gone. The one that asks then turns to another host, so both times are short.

use super::lines::Reader;
use axum::body::{Body, Bytes};
use futures::{
    Stream, StreamExt,
    stream::{self, BoxStream},
};
use serde::{Deserialize, Serialize};
use skep_engine::chat::ChatEvent;
use skep_runtime::{GenerationEvent, GenerationEvents, GenerationFailure, PeerError};
use std::{convert::Infallible, time::Duration};

/// Longest time between two lines of a writer.
const KEEP_ALIVE: Duration = Duration::from_secs(2);
/// Time after which a silent writer counts as gone.
pub(super) const SILENCE: Duration = Duration::from_secs(10);

/// A line as it is written.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Line {
    Event(Box<ChatEvent>),
    Failed(GenerationFailure),
    Alive {},
}

/// Returns the body that writes the events of an answer. Dropping it cancels the generation.
pub(super) fn write(answer: BoxStream<'static, GenerationEvent>) -> Body {
    Body::from_stream(lines(answer, KEEP_ALIVE).map(|line| Ok::<_, Infallible>(text(&line))))
}

fn lines(
    answer: impl Stream<Item = GenerationEvent> + Send + Unpin + 'static,
    keep_alive: Duration,
) -> impl Stream<Item = Line> + Send + 'static {
    stream::unfold(answer, move |mut answer| async move {
        // The stream keeps its place when the wait for its next event is given up.
        let line = match tokio::time::timeout(keep_alive, answer.next()).await {
            Ok(Some(GenerationEvent::Event(event))) => Line::Event(event),
            Ok(Some(GenerationEvent::Failed(failure))) => Line::Failed(failure),
            Ok(None) => return None,
            Err(_) => Line::Alive {},
        };
        Some((line, answer))
    })
}

/// Reads what another host has written.
pub(super) fn read(body: Body) -> GenerationEvents {
    let reader = Reader::new(body, SILENCE);
    Box::pin(stream::unfold(Some(reader), |reader| async move {
        let mut reader = reader?;
        loop {
            let event = match reader.next::<Line>().await? {
                Ok(Line::Event(event)) => GenerationEvent::Event(event),
                Ok(Line::Failed(failure)) => GenerationEvent::Failed(failure),
                Ok(Line::Alive {}) => continue,
                Err(error) => return Some((Err::<_, PeerError>(error), None)),
            };
            return Some((Ok(event), Some(reader)));
        }
    }))
}

fn text(line: &Line) -> Bytes {
    let mut text = serde_json::to_vec(line).expect("strings, numbers and JSON always serialize");
    text.push(b'\n');
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_engine::{
        Usage,
        chat::{ChatFinish, ChatOutcome, ToolCall},
    };

    #[tokio::test]
    async fn every_event_arrives_as_it_was_sent() {
        let call = ToolCall { id: "c".into(), name: "f".into(), arguments: "{\"a\": 1}".into() };
        let usage = Usage { prompt_tokens: 9, cached_tokens: 4, completion_tokens: 3, ..Usage::default() };
        let outcome = ChatOutcome {
            usage,
            reasoning: "hm".into(),
            tool_calls: vec![call.clone()],
            ..ChatOutcome::remote("two\nlines".into(), ChatFinish::ToolCalls)
        };
        let sent = [
            ChatEvent::Started { prompt_tokens: 9, cached_tokens: 4, cache_write_tokens: 0 },
            ChatEvent::Reasoning { delta: "hm".into() },
            ChatEvent::Text { delta: "two\nlines".into(), logprobs: Vec::new() },
            ChatEvent::ToolCallStarted { index: 0, id: "c".into(), name: "f".into() },
            ChatEvent::ToolCallArguments { index: 0, delta: call.arguments.clone() },
            ChatEvent::ToolCallFinished { index: 0, call },
            ChatEvent::Finished(outcome),
        ];
        let events = sent.clone().map(|event| GenerationEvent::Event(Box::new(event)));
        let arrived: Vec<_> = read(write(stream::iter(events).boxed())).collect().await;
        let shown: Vec<String> = arrived
            .iter()
            .map(|event| match event {
                Ok(GenerationEvent::Event(event)) => format!("{event:?}"),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(shown, sent.each_ref().map(|event| format!("{event:?}")));
        let failed = [GenerationEvent::Failed(GenerationFailure::Unloaded { why: "no".into() })];
        let arrived: Vec<_> = read(write(stream::iter(failed).boxed())).collect().await;
        let [Ok(GenerationEvent::Failed(failure))] = &arrived[..] else { panic!("{arrived:?}") };
        assert_eq!(*failure, GenerationFailure::Unloaded { why: "no".into() });
    }

    #[tokio::test]
    async fn a_generation_that_waits_still_writes_lines_and_they_are_not_events() {
        let lines = lines(stream::pending(), Duration::from_millis(1));
        let written: Vec<Line> = lines.take(3).collect().await;
        assert!(written.iter().all(|line| matches!(line, Line::Alive {})), "{written:?}");
        let texts: Vec<_> = written.iter().map(|line| Ok::<_, Infallible>(text(line))).collect();
        assert!(read(Body::from_stream(stream::iter(texts))).next().await.is_none());
    }
}
