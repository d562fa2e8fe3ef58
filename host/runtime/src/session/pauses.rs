//! The times at which turns of a session waited for people.

use std::{
    ops::Range,
    time::{Duration, Instant},
};

/// The pauses of a session through which messages in its mailbox may have waited, the latest last.
#[derive(Default)]
pub(super) struct Pauses(Vec<Range<Instant>>);

impl Pauses {
    pub(super) fn add(&mut self, pause: Range<Instant>) {
        self.0.push(pause);
    }

    /// Returns how long the session has paused since a message was queued. It is called for one message after the other, so the
    /// pauses before this one are dropped.
    pub(super) fn since(&mut self, queued_at: Instant) -> Duration {
        self.0.retain(|pause| pause.end > queued_at);
        self.0.iter().map(|pause| pause.end - pause.start.max(queued_at)).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_has_waited_through_the_pauses_after_it_was_queued() {
        let began = Instant::now();
        let at = |seconds| began + Duration::from_secs(seconds);
        let mut pauses = Pauses::default();
        pauses.add(at(0)..at(10));
        pauses.add(at(20)..at(50));
        for (queued_at, waited) in [(0, 40), (5, 35), (10, 30), (30, 20), (50, 0)] {
            assert_eq!(pauses.since(at(queued_at)), Duration::from_secs(waited), "{queued_at}");
        }
        assert!(pauses.0.is_empty(), "no later message has waited through them");
    }
}
