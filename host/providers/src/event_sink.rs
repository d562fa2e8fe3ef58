//! Sends the events of an answer to its caller, and tracks whether anything was sent.
//!
//! The work runs inside the caller's own task: the stream polls it, and dropping the stream drops it, with the
//! connection to the upstream.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll},
};

use futures::Stream;
use skep_engine::{
    EngineError, Usage,
    chat::{ChatEvent, ChatOutcome, RemoteStream, ToolCall},
};
use tokio::sync::mpsc;

type Work = Pin<Box<dyn Future<Output = Result<ChatOutcome, EngineError>> + Send>>;

/// The sender of one answer's events.
pub(crate) struct EventSink {
    events: mpsc::Sender<ChatEvent>,
    progress: Progress,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Progress {
    Nothing,
    Started,
    /// Reasoning, which is not part of the answer's text.
    Reasoning,
    Answer,
}

/// Returns the stream of the events that `work` sends, which ends with its result.
pub(crate) fn stream<F>(work: impl FnOnce(EventSink) -> F) -> RemoteStream
where
    F: Future<Output = Result<ChatOutcome, EngineError>> + Send + 'static,
{
    let (sender, events) = mpsc::channel(1);
    let work = work(EventSink { events: sender, progress: Progress::Nothing });
    Box::pin(EventStream { events, work: Some(Box::pin(work)) })
}

impl EventSink {
    /// Sends `Started`, unless it was sent before.
    pub(crate) async fn start(&mut self, usage: &Usage) {
        if self.progress == Progress::Nothing {
            let Usage { prompt_tokens, cached_tokens, cache_write_tokens, .. } = *usage;
            self.send(ChatEvent::Started { prompt_tokens, cached_tokens, cache_write_tokens }).await;
        }
    }

    pub(crate) async fn send(&mut self, event: ChatEvent) {
        let progress = match &event {
            ChatEvent::Routed(_) => Progress::Nothing,
            ChatEvent::Started { .. } => Progress::Started,
            ChatEvent::Reasoning { .. } => Progress::Reasoning,
            _ => Progress::Answer,
        };
        self.progress = self.progress.max(progress);
        // Without a receiver, this future is dropped, too.
        let _ = self.events.send(event).await;
    }

    /// Sends the calls of a whole answer.
    pub(crate) async fn send_calls(&mut self, calls: &[ToolCall]) {
        for (index, call) in calls.iter().enumerate() {
            let ToolCall { id, name, arguments } = call.clone();
            self.send(ChatEvent::ToolCallStarted { index, id, name }).await;
            self.send(ChatEvent::ToolCallArguments { index, delta: arguments }).await;
            self.send(ChatEvent::ToolCallFinished { index, call: call.clone() }).await;
        }
    }

    /// Returns whether anything of the answer or of its reasoning was sent.
    pub(crate) fn has_sent_anything(&self) -> bool {
        self.progress >= Progress::Reasoning
    }

    /// Returns whether any text or call was sent.
    pub(crate) fn has_sent_answer(&self) -> bool {
        self.progress >= Progress::Answer
    }
}

struct EventStream {
    events: mpsc::Receiver<ChatEvent>,
    work: Option<Work>,
}

impl Stream for EventStream {
    type Item = Result<ChatEvent, EngineError>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        // The work sends no more than one event between two looks at the channel.
        if let Poll::Ready(Some(event)) = self.events.poll_recv(cx) {
            return Poll::Ready(Some(Ok(event)));
        }
        let Some(work) = &mut self.work else { return Poll::Ready(None) };
        match work.as_mut().poll(cx) {
            Poll::Ready(result) => {
                // The last event may still be in the channel; the result follows it.
                if let Ok(event) = self.events.try_recv() {
                    self.work = Some(Box::pin(std::future::ready(result)));
                    return Poll::Ready(Some(Ok(event)));
                }
                self.work = None;
                Poll::Ready(Some(result.map(ChatEvent::Finished)))
            }
            Poll::Pending => match self.events.poll_recv(cx) {
                Poll::Ready(Some(event)) => Poll::Ready(Some(Ok(event))),
                Poll::Ready(None) | Poll::Pending => Poll::Pending,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt as _;
    use skep_engine::chat::ChatFinish;

    #[tokio::test]
    async fn events_come_in_order_and_the_result_last() {
        let mut events = stream(|mut sink| async move {
            let usage = Usage { prompt_tokens: 3, cached_tokens: 1, ..Usage::default() };
            sink.start(&usage).await;
            sink.start(&usage).await;
            assert!(!sink.has_sent_anything());
            for delta in ["a", "b"] {
                tokio::task::yield_now().await;
                sink.send(ChatEvent::Text { delta: delta.into(), logprobs: Vec::new() }).await;
            }
            assert!(sink.has_sent_answer());
            Ok(ChatOutcome::remote("ab".into(), ChatFinish::Stop))
        });
        let mut seen = String::new();
        while let Some(event) = events.next().await {
            match event.expect("no error") {
                ChatEvent::Started { .. } => seen.push('('),
                ChatEvent::Text { delta, .. } => seen.push_str(&delta),
                ChatEvent::Finished(_) => seen.push(')'),
                other => panic!("unexpected {other:?}"),
            }
        }
        assert_eq!(seen, "(ab)");
    }
}
