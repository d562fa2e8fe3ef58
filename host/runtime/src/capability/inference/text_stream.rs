//! The text of a generation that a guest reads as a stream.
//!
//! The generation never waits for the guest: unread text is concatenated, and is bounded by the generation's tokens. A
//! guest that never reads does not block anything.

use crate::journal::{NextRead, Reads};
use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
};
use wasmtime::{
    Result, StoreContextMut,
    component::{Destination, StreamProducer, StreamResult},
};

/// The generation's side of the stream. Dropping it ends the stream.
pub(crate) struct TextSink(Arc<Mutex<Unread>>);

/// A sink that also collects the whole text.
pub(crate) struct CollectingSink {
    sink: TextSink,
    text: String,
}

/// The guest's side of the stream. Its reads are in the turn's journal, and are repeated exactly on replay.
pub(crate) struct TextSource {
    unread: Arc<Mutex<Unread>>,
    reads: Reads,
}

#[derive(Default)]
struct Unread {
    text: String,
    /// Whether the guest has read some of the text.
    is_read: bool,
    ended: bool,
    reader: Option<Waker>,
}

pub(crate) fn text_stream(reads: Reads) -> (TextSink, TextSource) {
    let unread = Arc::new(Mutex::new(Unread::default()));
    (TextSink(unread.clone()), TextSource { unread, reads })
}

impl TextSink {
    pub(crate) fn push(&self, text: &str) {
        self.change(|unread| unread.text.push_str(text));
    }

    /// Discards the text, because the generation begins again, and returns `true`. If the guest has read some of it,
    /// returns `false` and discards nothing.
    fn discard(&self) -> bool {
        let mut unread = self.lock();
        if !unread.is_read {
            unread.text.clear();
        }
        !unread.is_read
    }

    fn lock(&self) -> MutexGuard<'_, Unread> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Unread)) {
        let reader = {
            let mut unread = self.lock();
            change(&mut unread);
            unread.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl CollectingSink {
    pub(crate) fn new(sink: TextSink) -> Self {
        CollectingSink { sink, text: String::new() }
    }

    pub(crate) fn push(&mut self, delta: &str) {
        self.text.push_str(delta);
        self.sink.push(delta);
    }

    /// Discards the text, because the generation begins again, and returns `true`. If the guest has read some of it,
    /// returns `false` and discards nothing.
    pub(crate) fn discard(&mut self) -> bool {
        let is_discarded = self.sink.discard();
        if is_discarded {
            self.text.clear();
        }
        is_discarded
    }

    /// Ends the stream and returns the whole text.
    pub(crate) fn end(self) -> String {
        self.text
    }
}

impl Drop for TextSink {
    fn drop(&mut self) {
        self.change(|unread| unread.ended = true);
    }
}

impl<D> StreamProducer<D> for TextSource {
    type Item = String;
    type Buffer = Option<String>;

    fn poll_produce<'a>(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        _store: StoreContextMut<'a, D>,
        mut destination: Destination<'a, String, Option<String>>,
        finish: bool,
    ) -> Poll<Result<StreamResult>> {
        match self.poll_read(cx) {
            Poll::Ready(text) if text.is_empty() => Poll::Ready(Ok(StreamResult::Dropped)),
            Poll::Ready(text) => {
                destination.set_buffer(Some(text));
                Poll::Ready(Ok(StreamResult::Completed))
            }
            Poll::Pending if finish => Poll::Ready(Ok(StreamResult::Cancelled)),
            Poll::Pending => Poll::Pending,
        }
    }
}

impl TextSource {
    /// Returns the text that the guest reads next. An empty text is the end of the stream.
    fn poll_read(&mut self, cx: &mut Context<'_>) -> Poll<String> {
        let next = ready!(self.reads.poll_next(cx));
        let mut unread = self.unread.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match next {
            NextRead::Again(bytes) => bytes,
            NextRead::New => unread.text.len(),
        };
        let is_there = match next {
            // The text of earlier reads is repeated, from the journal or by the model.
            NextRead::Again(bytes) => unread.text.is_char_boundary(bytes) || unread.ended,
            NextRead::New => bytes > 0 || unread.ended,
        };
        if !is_there {
            unread.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let end = unread.text.floor_char_boundary(bytes);
        let rest = unread.text.split_off(end);
        let text = std::mem::replace(&mut unread.text, rest);
        unread.is_read |= !text.is_empty();
        drop(unread);
        self.reads.made(text.len());
        Poll::Ready(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_discarded_unless_the_guest_has_read_some_of_it() {
        let mut collecting = CollectingSink::new(TextSink(Arc::default()));
        collecting.push("half");
        assert!(collecting.discard());
        collecting.push("whole");
        assert_eq!(collecting.sink.lock().text, "whole");
        collecting.sink.lock().is_read = true;
        assert!(!collecting.discard());
        assert_eq!(collecting.sink.lock().text, "whole");
        assert_eq!(collecting.end(), "whole");
    }
}
