//! Runs one future to completion on this thread.

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

/// Runs a future to completion, for tests that call an async function such as a tool directly.
pub fn block_on<F: Future>(future: F) -> F::Output {
    block_on_or(future, || false)
}

/// Does the same as [`block_on`], but when the future is pending, `idle` runs first. The thread parks only if `idle`
/// returns `false`, which means that it could not make progress either.
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
