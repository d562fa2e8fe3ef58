//! Watches whether a turn can make no progress until a person decides.

use super::{Feed, Suspension, SuspensionWatch};
use std::sync::Arc;

/// Watches whether a turn, or the one that it waits behind, only waits for people.
#[derive(Clone, Debug)]
pub(crate) struct IdleWatch {
    /// A turn of another host is followed only as long as its feed is held.
    feed: Arc<Feed>,
    own: SuspensionWatch,
    /// State of the session in whose mailbox the turn waits, once this watch has found it.
    session: Option<SuspensionWatch>,
}

impl IdleWatch {
    pub(super) fn new(feed: Arc<Feed>) -> Self {
        let own = SuspensionWatch::new(feed.suspension.subscribe());
        IdleWatch { feed, own, session: None }
    }

    /// Returns the suspension while the turn, or the one that it waits behind, only waits for people.
    pub(crate) fn current(&self) -> Option<Suspension> {
        // After this turn has ended, the state of the session is that of another turn.
        if self.feed.has_ended() {
            return None;
        }
        self.own.current().or_else(|| self.feed.session.get()?.current())
    }

    /// Resolves once the turn, or the one that it waits behind, only waits for people.
    pub(crate) async fn begins(&mut self) {
        while self.current().is_none() {
            self.changes().await;
        }
    }

    /// Resolves once the turn and the one that it waits behind continue, or the turn has ended.
    pub(crate) async fn ends(&mut self) {
        while self.current().is_some() {
            self.changes().await;
        }
    }

    /// Resolves once what [`IdleWatch::current`] returns may have changed since the last call.
    pub(super) async fn changes(&mut self) {
        if self.session.is_none() {
            self.session = self.feed.session.get().cloned();
        }
        match &mut self.session {
            None => self.own.changes().await,
            Some(session) => tokio::select! {
                () = self.own.changes() => {}
                () = session.changes() => {}
            },
        }
    }
}

impl SuspensionWatch {
    /// Resolves once the suspension has changed since the last call.
    async fn changes(&mut self) {
        if self.0.changed().await.is_err() {
            // The sender is gone, so nothing changes anymore.
            std::future::pending::<()>().await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{RuntimeError, feed::Hold};
    use futures::FutureExt as _;
    use tokio::sync::watch;

    fn suspended(approval: &str) -> Option<Suspension> {
        Some(Suspension { approval: approval.into() })
    }

    #[tokio::test]
    async fn a_turn_is_idle_while_it_or_the_one_ahead_waits_for_people() {
        let feed = Feed::new("t".into());
        let mut idle = feed.follow(Hold::Watches).idle_watch();
        let begun = tokio::spawn(async move {
            idle.begins().await;
            idle
        });
        tokio::task::yield_now().await;
        let (suspensions, session) = watch::channel(None);
        feed.queued_in(SuspensionWatch::new(session));
        suspensions.send_replace(suspended("u-1"));
        let mut idle = begun.await.expect("the task does not panic");
        assert_eq!(idle.current(), suspended("u-1"));
        assert!(idle.ends().now_or_never().is_none());
        suspensions.send_replace(None);
        idle.ends().await;
        assert!(idle.begins().now_or_never().is_none());
        feed.set_suspension(suspended("t-1"));
        idle.begins().await;
        assert_eq!(idle.current(), suspended("t-1"));
        // The next turn of the session may wait for people as soon as this one has ended.
        suspensions.send_replace(suspended("v-1"));
        feed.end(0, Err(RuntimeError::Cancelled));
        idle.ends().await;
    }

    #[tokio::test]
    async fn a_turn_that_is_watched_stays_suspended_without_followers() {
        let feed = Feed::new("t".into());
        feed.set_suspension(suspended("t-1"));
        let mut idle = feed.follow(Hold::Watches).idle_watch();
        let held = Arc::downgrade(&feed);
        drop(feed);
        assert!(idle.ends().now_or_never().is_none(), "nobody has decided");
        held.upgrade().expect("the watch holds it").set_suspension(None);
        idle.ends().await;
    }
}
