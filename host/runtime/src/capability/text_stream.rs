//! A generation's text on its way to a guest that reads it as a stream.
//!
//! The generation never waits for the guest: unread text is joined, and is bounded by the generation's tokens. A
//! guest that never reads holds up nothing.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll, Waker},
};
use wasmtime::{
    Result, StoreContextMut,
    component::{Destination, StreamProducer, StreamResult},
};

/// The generation's end. Dropping it ends the stream.
pub(crate) struct TextSink(Arc<Mutex<Unread>>);

/// The text of a generation for a guest that may be run again. It reads at once what it had read before a restart, because
/// calls that it made may follow from that; what is new only when everything that it was answered by then has been
/// answered again, because what follows from that came after it.
pub(crate) struct Telling {
    sink: TextSink,
    /// All of it so far.
    text: String,
    /// Bytes of it that the guest may read.
    told: usize,
}

/// The guest's end.
pub(crate) struct TextSource(Arc<Mutex<Unread>>);

#[derive(Default)]
struct Unread {
    text: String,
    ended: bool,
    reader: Option<Waker>,
}

pub(crate) fn text_stream() -> (TextSink, TextSource) {
    let unread = Arc::new(Mutex::new(Unread::default()));
    (TextSink(unread.clone()), TextSource(unread))
}

impl TextSink {
    pub(crate) fn push(&self, text: &str) {
        self.change(|unread| unread.text.push_str(text));
    }

    fn change(&self, change: impl FnOnce(&mut Unread)) {
        let reader = {
            let mut unread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut unread);
            unread.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Telling {
    pub(crate) fn new(sink: TextSink) -> Self {
        Telling { sink, text: String::new(), told: 0 }
    }

    /// More of the text, which the guest may read at once or after [`Telling::release`].
    pub(crate) fn push(&mut self, delta: &str, at_once: bool) {
        self.text.push_str(delta);
        if at_once {
            self.release();
        }
    }

    /// The guest may read everything that there is.
    pub(crate) fn release(&mut self) {
        if self.told < self.text.len() {
            self.sink.push(&self.text[self.told..]);
            self.told = self.text.len();
        }
    }

    /// The text ends here. Gives all of it.
    pub(crate) fn end(mut self) -> String {
        self.release();
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
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        _store: StoreContextMut<'a, D>,
        mut destination: Destination<'a, String, Option<String>>,
        finish: bool,
    ) -> Poll<Result<StreamResult>> {
        let mut unread = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if !unread.text.is_empty() {
            destination.set_buffer(Some(std::mem::take(&mut unread.text)));
            return Poll::Ready(Ok(StreamResult::Completed));
        }
        if unread.ended {
            return Poll::Ready(Ok(StreamResult::Dropped));
        }
        if finish {
            return Poll::Ready(Ok(StreamResult::Cancelled));
        }
        unread.reader = Some(cx.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_new_is_read_when_it_is_released_and_the_end_comes_last() {
        let (sink, source) = text_stream();
        let mut telling = Telling::new(sink);
        let read = || {
            let mut unread = source.0.lock().expect("no test panics with it");
            (std::mem::take(&mut unread.text), unread.ended)
        };
        telling.push("known ", true);
        telling.push("new ", false);
        telling.push("newer ", false);
        assert_eq!(read(), ("known ".to_owned(), false));
        telling.release();
        assert_eq!(read(), ("new newer ".to_owned(), false));
        telling.push("last", false);
        assert_eq!(telling.end(), "known new newer last");
        assert_eq!(read(), ("last".to_owned(), true));
    }
}
