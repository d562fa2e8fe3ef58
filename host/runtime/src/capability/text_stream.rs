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
