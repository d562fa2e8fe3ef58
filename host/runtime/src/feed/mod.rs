//! Delivers the events of a turn to its followers.
//!
//! A feed belongs to one turn. Any number of handles read it, each from the start, and each event
//! has its number from the turn's journal. A turn never waits for a slow reader: the size of a feed
//! is bounded by what a turn may produce.

mod idle;
mod live;
mod remote;

pub(crate) use idle::IdleWatch;
pub(crate) use live::{Live, LiveTurns, Sent};

use crate::{Outcome, RunEvent, RuntimeError, TurnClient, turn_timeline::LiveTimeline};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use tokio::sync::{Notify, watch};

/// A follower of one turn.
#[derive(Debug)]
pub struct RunHandle {
    feed: Arc<Feed>,
    /// Number of events of the feed that were delivered.
    next_index: usize,
    last_id: Option<u64>,
    end_reported: bool,
    hold: Hold,
    /// State of the turn ahead, if the reader does not want to wait for people.
    in_front: Option<SuspensionWatch>,
    /// The suspension that [`RunHandle::next_remote`] has reported.
    reported: Option<Suspension>,
}

/// Effect on the turn when its handle is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Hold {
    /// The turn is cancelled, and nothing of it is committed.
    Cancels,
    /// The turn continues.
    Watches,
}

/// The events of one turn.
#[derive(Debug)]
pub(crate) struct Feed {
    turn_id: String,
    inner: Mutex<Inner>,
    changed: Notify,
    cancelled: watch::Sender<bool>,
    suspension: watch::Sender<Option<Suspension>>,
    /// State of the session in whose mailbox the turn was put, whichever turn it is running.
    session: OnceLock<SuspensionWatch>,
    /// The client that waits for the turn, if it can receive notifications and questions.
    client: Mutex<Option<Weak<dyn TurnClient>>>,
    timeline: LiveTimeline,
}

/// State of a turn that only waits for people.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Suspension {
    /// A call that needs a decision, of this turn or of one that it waits for.
    pub(crate) approval: String,
}

/// Watches whether a turn only waits for people.
#[derive(Clone, Debug)]
pub(crate) struct SuspensionWatch(watch::Receiver<Option<Suspension>>);

#[derive(Debug, Default)]
struct Inner {
    events: Vec<(u64, RunEvent)>,
    end: End,
}

#[derive(Debug, Default)]
enum End {
    #[default]
    Open,
    /// `Done` is the last event.
    Done,
    Failed {
        code: &'static str,
        message: String,
        /// Given to the first follower; the others get its code and its text.
        error: Option<RuntimeError>,
    },
}

/// The sending end of a feed, held by the turn. Dropping it without an end, as when the host goes
/// down, is a cancellation for all followers.
#[derive(Debug)]
pub(crate) struct TurnEnd {
    feed: Arc<Feed>,
}

impl Feed {
    pub(crate) fn new(turn_id: String) -> Arc<Self> {
        let (inner, changed) = (Mutex::default(), Notify::new());
        let (cancelled, suspension) = (watch::Sender::new(false), watch::Sender::new(None));
        let (session, client, timeline) = (OnceLock::new(), Mutex::default(), LiveTimeline::default());
        Arc::new(Feed { turn_id, inner, changed, cancelled, suspension, session, client, timeline })
    }

    pub(crate) fn turn_id(&self) -> &str {
        &self.turn_id
    }

    pub(crate) fn timeline(&self) -> &LiveTimeline {
        &self.timeline
    }

    /// Publishes events with increasing numbers. Events that were already published before the turn
    /// was rerun are skipped.
    pub(crate) fn publish(&self, events: impl IntoIterator<Item = (u64, RunEvent)>) {
        let mut inner = self.lock();
        for (id, event) in events {
            if inner.events.last().is_none_or(|(last, _)| *last < id) {
                inner.events.push((id, event));
            }
        }
        drop(inner);
        self.changed.notify_waiters();
    }

    /// Sets the client that waits for the turn, until it is dropped.
    pub(crate) fn serve(&self, client: Weak<dyn TurnClient>) {
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) = Some(client);
    }

    /// Returns the client that waits for the turn, if there is one that can receive notifications and questions.
    pub(crate) fn client(&self) -> Option<Arc<dyn TurnClient>> {
        self.client.lock().unwrap_or_else(PoisonError::into_inner).as_ref()?.upgrade()
    }

    /// Creates a reader of all events, starting with the first.
    pub(crate) fn follow(self: &Arc<Self>, hold: Hold) -> RunHandle {
        RunHandle {
            feed: self.clone(),
            next_index: 0,
            last_id: None,
            end_reported: false,
            hold,
            in_front: None,
            reported: None,
        }
    }

    /// Returns the number of the last event.
    pub(crate) fn last_id(&self) -> Option<u64> {
        self.lock().events.last().map(|(id, _)| *id)
    }

    /// Sets the session into whose mailbox the turn is put. A turn is put into only one.
    pub(crate) fn queued_in(&self, session: SuspensionWatch) {
        let _ = self.session.set(session);
        // Those that already watch the turn have to watch the session, too.
        self.suspension.send_modify(|_unchanged| {});
    }

    /// Publishes that the turn only waits for people, or that it continues.
    pub(crate) fn set_suspension(&self, suspension: Option<Suspension>) {
        self.suspension.send_replace(suspension);
    }

    /// Returns a receiver of whether the turn is to be cancelled. It fails once nobody follows the feed anymore.
    pub(crate) fn cancellation(&self) -> watch::Receiver<bool> {
        self.cancelled.subscribe()
    }

    pub(crate) fn cancel(&self) {
        self.cancelled.send_replace(true);
    }

    /// Publishes the end of the turn. Only the first call has an effect.
    pub(crate) fn end(&self, id: u64, end: Result<Outcome, RuntimeError>) {
        let mut inner = self.lock();
        if !matches!(inner.end, End::Open) {
            return;
        }
        inner.end = match end {
            Ok(outcome) => {
                inner.events.push((id, RunEvent::Done(outcome)));
                End::Done
            }
            Err(error) => End::Failed { code: error.code(), message: error.to_string(), error: Some(error) },
        };
        drop(inner);
        self.suspension.send_replace(None);
        self.changed.notify_waiters();
    }

    fn has_ended(&self) -> bool {
        !matches!(self.lock().end, End::Open)
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl RunHandle {
    /// Returns the id by which clients refer to the turn.
    pub fn turn_id(&self) -> &str {
        self.feed.turn_id()
    }

    /// Cancels the turn if it runs on this host.
    pub fn cancel(&self) {
        self.feed.cancel();
    }

    /// Sets the client that waits for the turn, until it is dropped.
    pub(crate) fn serve(&self, client: Weak<dyn TurnClient>) {
        self.feed.serve(client);
    }

    /// Returns the number of the last delivered event. Numbers increase and are the same for all
    /// followers of the turn, also after a restart of the host.
    pub fn last_id(&self) -> Option<u64> {
        self.last_id
    }

    /// Returns whether the turn has succeeded and its last event has a number of at most `id`, so
    /// that nothing is left to deliver.
    pub fn has_ended_by(&self, id: u64) -> bool {
        let inner = self.feed.lock();
        matches!(inner.end, End::Done) && inner.events.last().is_some_and(|(last, _)| *last <= id)
    }

    pub(crate) fn suspension(&self) -> SuspensionWatch {
        SuspensionWatch(self.feed.suspension.subscribe())
    }

    /// Makes the handle end with an error if the turn ahead waits for people before this one has
    /// started.
    pub(crate) fn behind(mut self, in_front: SuspensionWatch) -> Self {
        self.in_front = Some(in_front);
        self
    }

    /// Watches whether the turn, or the one that it waits behind, only waits for people.
    pub(crate) fn idle_watch(&self) -> IdleWatch {
        IdleWatch::new(self.feed.clone())
    }

    /// Returns the next event, or `None` after `Done` or an error.
    pub async fn next(&mut self) -> Option<Result<RunEvent, RuntimeError>> {
        loop {
            let feed = self.feed.clone();
            let changed = feed.changed.notified();
            tokio::pin!(changed);
            // No change is missed from here on.
            changed.as_mut().enable();
            // Read before the events, because a suspension caused by this turn itself follows its first
            // event.
            let suspension =
                self.in_front.as_ref().filter(|_| self.next_index == 0).and_then(SuspensionWatch::current);
            {
                let mut inner = feed.lock();
                if let Some((id, event)) = inner.events.get(self.next_index) {
                    self.next_index += 1;
                    self.last_id = Some(*id);
                    return Some(Ok(event.clone()));
                }
                match &mut inner.end {
                    End::Open if self.end_reported => return None,
                    End::Open => {
                        if let Some(Suspension { approval }) = suspension {
                            self.end_reported = true;
                            return Some(Err(RuntimeError::WaitingForApproval { approval }));
                        }
                    }
                    End::Failed { code, message, error } if !self.end_reported => {
                        self.end_reported = true;
                        let failed = || RuntimeError::TurnFailed { code, message: message.clone() };
                        return Some(Err(error.take().unwrap_or_else(failed)));
                    }
                    End::Done | End::Failed { .. } => return None,
                }
            }
            match self.in_front.as_mut().filter(|_| self.next_index == 0) {
                None => changed.await,
                Some(in_front) => tokio::select! {
                    () = changed => {}
                    () = in_front.begins() => {}
                },
            }
        }
    }

    /// Waits for the end of the turn and returns its outcome.
    pub async fn outcome(mut self) -> Result<Outcome, RuntimeError> {
        while let Some(event) = self.next().await {
            if let RunEvent::Done(outcome) = event? {
                return Ok(outcome);
            }
        }
        Err(RuntimeError::Cancelled)
    }
}

impl SuspensionWatch {
    pub(crate) fn new(suspensions: watch::Receiver<Option<Suspension>>) -> Self {
        SuspensionWatch(suspensions)
    }

    /// Returns the suspension while the turn only waits for people.
    pub(crate) fn current(&self) -> Option<Suspension> {
        self.0.borrow().clone()
    }

    /// Resolves once the turn only waits for people.
    pub(crate) async fn begins(&mut self) {
        if self.0.wait_for(Option::is_some).await.is_err() {
            // The feed is gone, so no suspension will ever start.
            std::future::pending::<()>().await;
        }
    }

    /// Resolves once the turn continues or has ended.
    pub(crate) async fn ends(&mut self) {
        // A feed is only dropped after its turn has ended.
        let _ = self.0.wait_for(Option::is_none).await;
    }
}

impl Drop for RunHandle {
    fn drop(&mut self) {
        if self.hold == Hold::Cancels {
            self.feed.cancel();
        }
    }
}

impl TurnEnd {
    pub(crate) fn new(feed: Arc<Feed>) -> Self {
        TurnEnd { feed }
    }

    pub(crate) fn feed(&self) -> &Arc<Feed> {
        &self.feed
    }

    /// Resolves when nobody wants the turn anymore.
    pub(crate) async fn abandoned(&self) {
        // The sender is part of the feed, so it is not dropped meanwhile.
        let _ = self.feed.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }

    /// Publishes that the turn is suspended, or that it continues.
    pub(crate) fn set_suspension(&self, suspension: Option<Suspension>) {
        self.feed.set_suspension(suspension);
    }

    pub(crate) fn is_abandoned(&self) -> bool {
        *self.feed.cancelled.borrow()
    }
}

impl Drop for TurnEnd {
    fn drop(&mut self) {
        self.feed.end(0, Err(RuntimeError::Cancelled));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn outcome() -> Outcome {
        Outcome { text: "hi".into(), data: None, turn: 1, usage: Default::default(), elapsed_us: 1 }
    }

    fn delta(text: &str) -> RunEvent {
        RunEvent::Delta { text: text.into() }
    }

    #[tokio::test]
    async fn every_follower_receives_every_event_once() {
        let feed = Feed::new("t".into());
        let mut first = feed.follow(Hold::Cancels);
        feed.publish([(0, RunEvent::Started { turn: 1 }), (2, delta("a"))]);
        assert_eq!(first.next().await.expect("there").expect("well"), RunEvent::Started { turn: 1 });
        feed.publish([(5, delta("b"))]);
        feed.end(6, Ok(outcome()));
        let mut late = feed.follow(Hold::Watches);
        let mut ids = Vec::new();
        while let Some(event) = late.next().await {
            event.expect("the turn went well");
            ids.extend(late.last_id());
        }
        assert_eq!(ids, [0, 2, 5, 6]);
        assert_eq!(first.outcome().await.expect("the rest"), outcome());
    }

    #[tokio::test]
    async fn each_follower_receives_an_error_once_and_last() {
        let feed = Feed::new("t".into());
        let (mut one, mut two) = (feed.follow(Hold::Cancels), feed.follow(Hold::Watches));
        feed.end(0, Err(RuntimeError::DeadlineExceeded));
        for handle in [&mut one, &mut two] {
            let error = handle.next().await.expect("an end").expect_err("an error");
            assert_eq!(error.code(), "deadline_exceeded");
            assert!(handle.next().await.is_none());
        }
    }

    #[tokio::test]
    async fn a_dropped_turn_end_reports_cancellation_to_the_caller() {
        let feed = Feed::new("t".into());
        let handle = feed.follow(Hold::Cancels);
        drop(TurnEnd::new(feed));
        assert_eq!(handle.outcome().await.expect_err("no outcome").code(), "cancelled");
    }

    #[tokio::test]
    async fn a_suspension_ahead_ends_waiting_handles_but_not_started_ones() {
        let (suspensions, in_front) = watch::channel(None);
        let feed = Feed::new("t".into());
        let behind = || feed.follow(Hold::Watches).behind(SuspensionWatch::new(in_front.clone()));
        let (mut waits, mut begun) = (behind(), behind());
        let event = tokio::spawn(async move { (waits.next().await, waits.next().await.is_none()) });
        let suspension = Some(Suspension { approval: "t-1".into() });
        suspensions.send_replace(suspension.clone());
        let (event, is_over) = event.await.expect("the task does not panic");
        let error = event.expect("an end").expect_err("nobody decided");
        assert_eq!((error.code(), is_over), ("waiting_for_approval", true));
        suspensions.send_replace(None);
        feed.publish([(0, RunEvent::Started { turn: 1 })]);
        // This is the suspension of the turn itself.
        suspensions.send_replace(suspension);
        begun.next().await.expect("not over").expect("it has begun");
        feed.end(1, Ok(outcome()));
        assert_eq!(begun.outcome().await.expect("no suspension"), outcome());
    }

    #[tokio::test]
    async fn only_dropping_the_owning_handle_cancels_the_turn() {
        let feed = Feed::new("t".into());
        let (holds, watches) = (feed.follow(Hold::Cancels), feed.follow(Hold::Watches));
        let end = TurnEnd::new(feed);
        drop(watches);
        assert!(!end.is_abandoned());
        drop(holds);
        end.abandoned().await;
        assert!(end.is_abandoned());
    }
}
