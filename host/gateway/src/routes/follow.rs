//! The response to a client that follows a log: its new entries as events, without an end.

use crate::{
    Gateway,
    sse::{self, Message, Step, Writer},
};
use axum::response::Response;
use futures::{Stream, StreamExt, future, stream};
use skep_runtime::RuntimeError;
use std::marker::PhantomData;

/// Responds with the entries of `first`, and then with those of `later`, each as the event that `event` makes of it. The
/// stream ends when the server shuts down, which would otherwise wait for it. `what` names the entries for the log.
pub(super) fn respond<T: Send + 'static>(
    gateway: &Gateway,
    what: &'static str,
    first: Vec<T>,
    later: impl Stream<Item = Result<Vec<T>, RuntimeError>> + Send + 'static,
    event: impl FnMut(T) -> Message + Send + 'static,
) -> Response {
    let mut draining = gateway.draining.subscribe();
    let shutdown = async move {
        // A server that is gone does not wait for the stream either.
        let _ = draining.wait_for(|draining| *draining).await;
    };
    let later = later.take_until(shutdown).scan((), move |(), entries| {
        let entries = entries.inspect_err(|error| tracing::debug!(%error, "a stream of {what} ended early"));
        future::ready(entries.ok())
    });
    let entries = stream::iter([first]).chain(later);
    sse::respond(entries.boxed(), Events { event, kind: PhantomData })
}

/// Makes an event of each entry.
struct Events<T, F> {
    event: F,
    kind: PhantomData<fn(T)>,
}

impl<T: Send + 'static, F: FnMut(T) -> Message + Send + 'static> Writer for Events<T, F> {
    type Item = Vec<T>;

    fn write(&mut self, entries: Vec<T>) -> Step {
        Step::Go(entries.into_iter().map(&mut self.event).collect())
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}
