//! Publishes the events of a turn that runs on another host in a feed of this one.
//!
//! If the connection ends before the turn does, a turn that outlives its caller is followed where it runs then: on another host,
//! or on this one if this one has taken it over. Events have the same numbers everywhere, so followers get each of them once.
//! Only the turn's row says whether the turn has ended, not a host that is stopping.
//!
//! The pump holds neither the host nor the feed: it ends with either of them. While nobody follows the feed, nobody needs the
//! connection, and a turn that ends with its caller is cancelled by closing it.

use super::{
    Asks, Dispatch,
    forwarding::{Located, gone},
};
use crate::{
    Member, PeerError, RemoteEvent, RemoteEvents, RunEvent, RunHandle, RuntimeError, TurnAddress,
    cluster::{PATIENCE, POLL_INTERVAL, failure},
    feed::{Feed, Sent, Suspension},
};
use futures::StreamExt as _;
use std::{
    sync::{Arc, Weak},
    time::{Duration, Instant},
};
use tokio::sync::watch;

/// A source that lasted this long was worth finding, even if it sent no event.
const STABLE: Duration = Duration::from_secs(5);
/// Delay before a turn is looked for again.
const AGAIN: Duration = POLL_INTERVAL.saturating_mul(4);

pub(super) struct Pump {
    dispatch: Weak<Dispatch>,
    address: TurnAddress,
    feed: Weak<Feed>,
    cancelled: watch::Receiver<bool>,
    /// Whether the cancellation was passed on.
    has_cancelled: bool,
    outlives_caller: bool,
    _sent: Sent,
}

/// The events of a turn, and the host that they come from; `None` is this one.
pub(super) struct Source {
    pub(super) member: Option<Member>,
    pub(super) events: RemoteEvents,
}

/// The reason why no more events come from a source.
enum Stop {
    /// The followers have the end of the turn, or there are none.
    Over,
    /// The turn may continue elsewhere.
    Cut(String),
}

impl Pump {
    pub(super) fn new(
        dispatch: &Arc<Dispatch>,
        address: TurnAddress,
        feed: &Arc<Feed>,
        outlives_caller: bool,
    ) -> Self {
        Pump {
            dispatch: Arc::downgrade(dispatch),
            address,
            feed: Arc::downgrade(feed),
            cancelled: feed.cancellation(),
            has_cancelled: false,
            outlives_caller,
            _sent: dispatch.host.live.enter_sent(feed, !outlives_caller),
        }
    }

    /// Runs until the turn has ended, nobody follows it, or it cannot be found anymore.
    pub(super) async fn run(mut self, mut source: Source) {
        // Set while one source after the other ends at once and without a new event.
        let mut limit = None;
        loop {
            let (before, began) = (self.last_id(), Instant::now());
            let why = match self.publish(&mut source).await {
                Stop::Over => return,
                Stop::Cut(why) => why,
            };
            if !self.outlives_caller {
                let member = source.member.unwrap_or(Member { number: 0, url: String::new() });
                return self.end(gone(&member, &why));
            }
            tracing::info!(turn = self.address.turn, "looking for a turn whose host stopped sending: {why}");
            if self.last_id() > before || began.elapsed() > STABLE {
                limit = None;
            } else if limit.is_some() {
                tokio::time::sleep(AGAIN).await;
            }
            let until = *limit.get_or_insert_with(|| Instant::now() + PATIENCE);
            if Instant::now() >= until {
                return self.end(lost(why));
            }
            source = match self.find(until).await {
                Some(found) => found,
                None => return,
            };
        }
    }

    /// Publishes the events of a source until no more come.
    async fn publish(&mut self, source: &mut Source) -> Stop {
        loop {
            let event = tokio::select! {
                wanted = is_cancelled(&mut self.cancelled), if !self.has_cancelled => {
                    // Closing the connection cancels a turn that ends with its caller.
                    if !wanted || !self.outlives_caller {
                        return Stop::Over;
                    }
                    self.cancel(source);
                    continue;
                }
                event = source.events.next() => event,
            };
            // Nobody follows the turn anymore.
            let Some(feed) = self.feed.upgrade() else { return Stop::Over };
            match event {
                Some(Ok(
                    RemoteEvent::Ended { id, outcome }
                    | RemoteEvent::Event { id, event: RunEvent::Done(outcome) },
                )) => {
                    feed.end(id, Ok(outcome));
                    return Stop::Over;
                }
                Some(Ok(RemoteEvent::Event { id, event })) => feed.publish([(id, event)]),
                Some(Ok(RemoteEvent::Suspended { approval })) => {
                    feed.set_suspension(Some(Suspension { approval }))
                }
                Some(Ok(RemoteEvent::Resumed)) => feed.set_suspension(None),
                Some(Ok(RemoteEvent::Failed { code, message, retry_after_ms })) => {
                    if self.outlives_caller && self.is_open().await {
                        return Stop::Cut(message);
                    }
                    feed.end(0, Err(failure(&code, message, retry_after_ms)));
                    return Stop::Over;
                }
                Some(Err(PeerError::Refused { message, .. })) => return Stop::Cut(message),
                Some(Err(error)) => return Stop::Cut(error.to_string()),
                None => return Stop::Cut("the connection was closed".to_owned()),
            }
        }
    }

    /// Passes the cancellation of a turn that outlives its caller on to its host.
    fn cancel(&mut self, source: &Source) {
        self.has_cancelled = true;
        let Some(dispatch) = self.dispatch.upgrade() else { return };
        match &source.member {
            Some(member) => dispatch.cancel_there(member.clone(), self.address.clone()),
            None => {
                if let Some(feed) = dispatch.host.live.get(&self.address.turn) {
                    feed.cancel();
                }
            }
        }
    }

    /// Returns whether the turn may still end elsewhere.
    async fn is_open(&self) -> bool {
        let Some(dispatch) = self.dispatch.upgrade() else { return false };
        let TurnAddress { agent, session, turn } = &self.address;
        dispatch.is_open(agent, session, turn).await
    }

    /// Finds the turn where it runs now. Returns `None` after publishing why it cannot be found, or if nobody follows it.
    async fn find(&mut self, until: Instant) -> Option<Source> {
        // A cancellation is passed on to the next host, too.
        self.has_cancelled = false;
        loop {
            self.feed.upgrade()?.set_suspension(None);
            let Some(dispatch) = self.dispatch.upgrade() else {
                self.end(RuntimeError::ShuttingDown);
                return None;
            };
            if let Err(stops) = dispatch.host.shutdown.admit() {
                self.end(stops);
                return None;
            }
            let TurnAddress { agent, session, turn } = &self.address;
            let error = match dispatch.locate(agent, session, turn, Asks::Others).await {
                Ok(Located::There(member, run)) => {
                    return Some(Source { member: Some(member), events: run.events });
                }
                Ok(Located::Here(handle)) => return Some(Source { member: None, events: events_of(handle) }),
                Err(error) => error,
            };
            drop(dispatch);
            if let RuntimeError::TurnNotFound { .. } | RuntimeError::AgentNotFound { .. } = error {
                self.end(error);
                return None;
            }
            if Instant::now() >= until {
                self.end(lost(error.to_string()));
                return None;
            }
            tokio::time::sleep(AGAIN).await;
        }
    }

    fn last_id(&self) -> Option<u64> {
        self.feed.upgrade()?.last_id()
    }

    fn end(&self, error: RuntimeError) {
        if let Some(feed) = self.feed.upgrade() {
            feed.end(0, Err(error));
        }
    }
}

/// Waits until the turn is to be cancelled, and returns `true`; returns `false` once nobody follows it.
async fn is_cancelled(cancelled: &mut watch::Receiver<bool>) -> bool {
    cancelled.wait_for(|cancelled| *cancelled).await.is_ok()
}

/// Returns the error of a turn that may still run, but that nobody could follow for a while.
fn lost(why: String) -> RuntimeError {
    let message = format!("the turn cannot be followed now, and may still be running on another host: {why}");
    RuntimeError::TurnFailed { code: "host_gone", message }
}

/// Returns the events of a turn that this host has taken over.
fn events_of(handle: RunHandle) -> RemoteEvents {
    let events = futures::stream::unfold(handle, |mut handle| async move {
        let event = handle.next_remote().await?;
        Some((Ok::<_, PeerError>(event), handle))
    });
    Box::pin(events)
}
