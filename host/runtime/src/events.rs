//! The way of events from a turn to its caller.
//!
//! A turn never waits for a slow reader: text that was not read yet is joined to one event, so that what is queued is
//! bounded by what a turn may produce. Dropping the [`RunHandle`] tells the turn to stop.

use crate::{Outcome, RunEvent, RuntimeError};
use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use tokio::sync::{Notify, watch};

/// The caller's end of a turn. Dropping it cancels the turn, and nothing of it is committed.
#[derive(Debug)]
pub struct RunHandle {
    queue: Arc<Queue>,
    _alive: watch::Sender<()>,
}

/// The turn's end. Dropping it without a word, as when the host goes down, cancels the turn for its caller too.
#[derive(Debug)]
pub(crate) struct TurnEnd {
    events: Events,
    caller: watch::Receiver<()>,
}

/// For everything in a turn that has something to tell.
#[derive(Clone, Debug)]
pub(crate) struct Events {
    queue: Arc<Queue>,
}

#[derive(Debug, Default)]
struct Queue {
    inner: Mutex<Inner>,
    changed: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    events: VecDeque<RunEvent>,
    end: End,
}

#[derive(Debug, Default)]
enum End {
    #[default]
    Open,
    Failed(RuntimeError),
    /// Everything has been queued.
    Closed,
    /// The reader knows.
    Told,
}

/// Both ends of a new turn.
pub(crate) fn run_channel() -> (TurnEnd, RunHandle) {
    let queue = Arc::new(Queue::default());
    let (alive, caller) = watch::channel(());
    (TurnEnd { events: Events { queue: queue.clone() }, caller }, RunHandle { queue, _alive: alive })
}

impl RunHandle {
    /// The next event. `None` after `Done` or an error.
    pub async fn next(&mut self) -> Option<Result<RunEvent, RuntimeError>> {
        loop {
            let changed = self.queue.changed.notified();
            {
                let mut inner = self.queue.lock();
                if let Some(event) = inner.events.pop_front() {
                    return Some(Ok(event));
                }
                match std::mem::replace(&mut inner.end, End::Told) {
                    End::Open => inner.end = End::Open,
                    End::Failed(error) => return Some(Err(error)),
                    End::Closed | End::Told => return None,
                }
            }
            changed.await;
        }
    }

    /// Waits for the end of the turn.
    pub async fn outcome(mut self) -> Result<Outcome, RuntimeError> {
        while let Some(event) = self.next().await {
            if let RunEvent::Done(outcome) = event? {
                return Ok(outcome);
            }
        }
        Err(RuntimeError::Cancelled)
    }
}

impl Events {
    pub(crate) fn push(&self, event: RunEvent) {
        let mut inner = self.queue.lock();
        match (event, inner.events.back_mut()) {
            (RunEvent::Delta { text }, Some(RunEvent::Delta { text: unread })) => unread.push_str(&text),
            (event, _) => inner.events.push_back(event),
        }
        drop(inner);
        self.queue.changed.notify_one();
    }
}

impl TurnEnd {
    pub(crate) fn events(&self) -> &Events {
        &self.events
    }

    /// The last thing that the caller hears.
    pub(crate) fn finish(self, end: Result<Outcome, RuntimeError>) {
        self.close(match end {
            Ok(outcome) => {
                self.events.push(RunEvent::Done(outcome));
                End::Closed
            }
            Err(error) => End::Failed(error),
        });
    }

    /// Resolves when the caller has dropped its handle.
    pub(crate) async fn abandoned(&self) {
        let mut caller = self.caller.clone();
        while caller.changed().await.is_ok() {}
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        self.caller.has_changed().is_err()
    }

    fn close(&self, end: End) {
        let mut inner = self.events.queue.lock();
        if matches!(inner.end, End::Open) {
            inner.end = end;
        }
        drop(inner);
        self.events.queue.changed.notify_one();
    }
}

impl Drop for TurnEnd {
    fn drop(&mut self) {
        self.close(End::Failed(RuntimeError::Cancelled));
    }
}

impl Queue {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome { text: "hi".into(), data: None, turn: 1, usage: Default::default(), elapsed_us: 1 }
    }

    #[tokio::test]
    async fn unread_text_is_joined_and_order_is_kept() {
        let (end, mut handle) = run_channel();
        let events = end.events().clone();
        events.push(RunEvent::Started { turn: 1 });
        events.push(RunEvent::Delta { text: "a".into() });
        events.push(RunEvent::Delta { text: "b".into() });
        end.finish(Ok(outcome()));
        let mut seen = Vec::new();
        while let Some(event) = handle.next().await {
            seen.push(event.expect("the turn went well"));
        }
        assert_eq!(
            seen,
            [RunEvent::Started { turn: 1 }, RunEvent::Delta { text: "ab".into() }, RunEvent::Done(outcome())]
        );
    }

    #[tokio::test]
    async fn an_error_comes_once_and_last() {
        let (end, mut handle) = run_channel();
        end.finish(Err(RuntimeError::DeadlineExceeded));
        assert_eq!(handle.next().await.expect("an end").expect_err("an error").code(), "deadline_exceeded");
        assert!(handle.next().await.is_none());
    }

    #[tokio::test]
    async fn a_turn_that_vanishes_is_cancelled_for_its_caller() {
        let (end, handle) = run_channel();
        drop(end);
        assert_eq!(handle.outcome().await.expect_err("no outcome").code(), "cancelled");
    }

    #[tokio::test]
    async fn dropping_the_handle_tells_the_turn() {
        let (end, handle) = run_channel();
        assert!(!end.is_abandoned());
        drop(handle);
        end.abandoned().await;
        assert!(end.is_abandoned());
    }
}
