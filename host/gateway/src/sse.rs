//! Streams of server-sent events. The body owns the producer of the events, so a client that disconnects cancels it.

use axum::response::{
    IntoResponse, Response,
    sse::{Event, KeepAlive, Sse},
};
use futures::{Stream, StreamExt};
use serde::Serialize;
use std::{collections::VecDeque, convert::Infallible, time::Duration};

/// Converts the items of a stream into messages to send.
pub(crate) trait Writer: Send + 'static {
    type Item: Send;

    /// Converts an item. `Break` sends its messages and ends the body without [`Writer::end`].
    fn write(&mut self, item: Self::Item) -> Step;
    /// Returns the messages that follow the last item.
    fn end(&mut self) -> Vec<Message>;
}

/// The messages of an item, and whether the stream continues.
pub(crate) enum Step {
    Go(Vec<Message>),
    Break(Vec<Message>),
}

/// One event.
pub(crate) struct Message {
    /// The id of the event. A client that lost the stream sends the last one that it saw as `Last-Event-ID`.
    pub id: Option<u64>,
    pub name: Option<&'static str>,
    pub data: String,
}

impl Message {
    pub(crate) fn data(value: &impl Serialize) -> Self {
        Message { id: None, name: None, data: text(value) }
    }

    pub(crate) fn named(name: &'static str, value: &impl Serialize) -> Self {
        Message::of_text(name, text(value))
    }

    /// Creates an event from JSON text. Line breaks are replaced, because an event's data must be on one line.
    pub(crate) fn of_text(name: &'static str, json: String) -> Self {
        let data = if json.contains(['\n', '\r']) { json.replace(['\n', '\r'], " ") } else { json };
        Message { id: None, name: Some(name), data }
    }

    pub(crate) fn done() -> Self {
        Message { id: None, name: None, data: "[DONE]".to_owned() }
    }
}

/// Returns a response whose body consists of the messages that `writer` creates from `items`.
pub(crate) fn respond<W: Writer>(
    items: impl Stream<Item = W::Item> + Send + Unpin + 'static,
    writer: W,
) -> Response {
    let pump = Pump { items: Some(items), writer, ready: VecDeque::new() };
    let events = futures::stream::unfold(pump, |mut pump| async move {
        let message = pump.next().await?;
        let event = Event::default().data(message.data);
        let event = match message.name {
            Some(name) => event.event(name),
            None => event,
        };
        let event = match message.id {
            Some(id) => event.id(id.to_string()),
            None => event,
        };
        Some((Ok::<_, Infallible>(event), pump))
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(Duration::from_secs(15))).into_response()
}

struct Pump<S, W> {
    /// `None` after the last item, so that the producer is dropped immediately.
    items: Option<S>,
    writer: W,
    ready: VecDeque<Message>,
}

impl<W: Writer, S: Stream<Item = W::Item> + Unpin> Pump<S, W> {
    async fn next(&mut self) -> Option<Message> {
        loop {
            if let Some(message) = self.ready.pop_front() {
                return Some(message);
            }
            let items = self.items.as_mut()?;
            match items.next().await.map(|item| self.writer.write(item)) {
                Some(Step::Go(messages)) => self.ready.extend(messages),
                Some(Step::Break(messages)) => {
                    self.ready.extend(messages);
                    self.items = None;
                }
                None => {
                    let messages = self.writer.end();
                    self.ready.extend(messages);
                    self.items = None;
                }
            }
        }
    }
}

fn text(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("strings, numbers and JSON always serialize")
}
