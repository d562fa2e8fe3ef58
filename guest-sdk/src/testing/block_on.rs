//! Driving one future to its end on this thread.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};

struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future to its end, for tests that call an async function such as a tool directly.
pub fn block_on<F: Future>(future: F) -> F::Output {
    block_on_or(future, || false)
}

/// The same. When nothing can go on, `idle` is asked first whether it made something go on.
pub(super) fn block_on_or<F: Future>(future: F, mut idle: impl FnMut() -> bool) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut cx = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut cx) {
            Poll::Ready(output) => return output,
            Poll::Pending if idle() => {}
            Poll::Pending => thread::park(),
        }
    }
}
