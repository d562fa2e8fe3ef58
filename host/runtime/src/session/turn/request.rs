//! A turn in its session's mailbox, and what surrounds its run: the span, the metrics, and the
//! order in which its followers are informed and its resources are released.

use super::{Run, ended::Ended, span};
use crate::{
    admission::Admitted,
    feed::{Feed, Live, TurnEnd},
    metric,
    session::{actor::Actor, message::Message},
};
use std::{sync::Arc, time::Instant};
use tracing::{Instrument, Span};

/// A message that is queued for its turn.
pub(crate) struct TurnRequest {
    pub(crate) message: Message,
    pub(crate) end: TurnEnd,
    /// The span of the sender of the message.
    pub(crate) parent: Span,
    /// When the message was put into the mailbox.
    pub(crate) queued_at: Instant,
    /// Held until the turn has ended, also in the store, and all its followers have been informed.
    pub(crate) live: Arc<Live>,
    /// Held until the turn has ended, so that a drain waits for it.
    pub(crate) admitted: Admitted,
}

impl TurnRequest {
    pub(crate) fn new(message: Message, feed: Arc<Feed>, live: Arc<Live>, admitted: Admitted) -> Self {
        let (end, parent, queued_at) = (TurnEnd::new(feed), Span::current(), Instant::now());
        TurnRequest { message, end, parent, queued_at, live, admitted }
    }
}

impl Actor {
    /// Runs a turn of the session and informs its followers of the end.
    pub(in crate::session) async fn turn(&mut self, request: TurnRequest) {
        // The fields that are not moved below are dropped in reverse order: `live` is released
        // after the followers have been informed and the turn no longer counts as active.
        let TurnRequest { mut message, end, parent, queued_at, live, admitted } = request;
        // A caller of this turn was suspended as long as the turn ahead was.
        message.extend_deadline(self.pauses.since(queued_at));
        let Admitted { active: _active, held } = admitted;
        let span = span::begin(&parent, &self.key, end.feed().turn_id());
        let started = Instant::now();
        let run = Run { actor: self, end: &end, live: &live };
        let ended = run.drive(message, started).instrument(span.clone()).await;

        let label = ended.label();
        let agent = self.key.agent.clone();
        metrics::counter!(metric::TURNS, "agent" => agent.clone(), "outcome" => label).increment(1);
        metrics::histogram!(metric::TURN_TIME, "agent" => agent).record(started.elapsed());
        span::end(&span, &ended);
        // A caller that sees the turn end can rely on the message's memory being released.
        drop(held);
        match ended {
            Ended::Done { last_id, outcome } => end.feed().end(last_id + 1, Ok(outcome)),
            Ended::Failed(error) | Ended::LeftOpen(error) => end.feed().end(0, Err(error)),
        }
    }
}
