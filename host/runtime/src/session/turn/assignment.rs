//! The message that a turn answers, and what follows from the message alone.

use crate::{Invocation, Origin, agent::Agent, event::turn_events::TurnEnding, feed::Hold};
use std::time::{Duration, Instant};

/// A turn's message and what follows from it. Apart from its time, it stays the same however often
/// the turn is suspended.
pub(super) struct Assignment {
    pub(super) invocation: Box<Invocation>,
    pub(super) received_at_ms: u64,
    /// Whether the turn is cancelled when its caller goes away. This depends on how the message was
    /// accepted, and the turn's row does not change it.
    pub(super) hold: Hold,
    /// Announces the turn's end.
    pub(super) ending: TurnEnding,
    pub(super) time: TurnTime,
}

/// The clock of a turn. It does not advance while the turn is suspended.
#[derive(Clone, Copy, Debug)]
pub(super) struct TurnTime {
    started: Instant,
    /// The deadline that the caller asked for.
    asked_deadline: Option<Instant>,
}

impl Assignment {
    /// Returns the name of the tool that the turn is a call of.
    pub(super) fn tool(&self) -> Option<&str> {
        match &self.invocation.origin {
            Origin::Tool(tool) => Some(&tool.name),
            _ => None,
        }
    }

    /// Returns how long the turn may take. The timeout of a tool counts if a client calls it; an agent that calls a tool
    /// enforces the timeout itself, and repeats the call.
    pub(super) fn limit_ms(&self, agent: &Agent) -> u32 {
        let turn_ms = agent.limits.turn_ms;
        match &self.invocation.origin {
            Origin::Tool(tool) if tool.callers.is_empty() => {
                let timeout_ms = agent.tools.get(&tool.name).and_then(|tool| tool.definition.timeout_ms);
                timeout_ms.map_or(turn_ms, |timeout_ms| turn_ms.min(timeout_ms))
            }
            _ => turn_ms,
        }
    }
}

impl TurnTime {
    pub(super) fn new(started: Instant, asked_deadline: Option<Instant>) -> Self {
        TurnTime { started, asked_deadline }
    }

    /// Returns the time at which the turn would have started without its pauses.
    pub(super) fn started(&self) -> Instant {
        self.started
    }

    /// Excludes a pause of this length.
    pub(super) fn paused(&mut self, pause: Duration) {
        self.started += pause;
        self.asked_deadline = self.asked_deadline.map(|deadline| deadline + pause);
    }

    /// Returns when a turn with the limit `turn_ms` has to finish.
    pub(super) fn deadline(&self, turn_ms: u32) -> Instant {
        let limit = self.started + Duration::from_millis(turn_ms.into());
        self.asked_deadline.map_or(limit, |asked| limit.min(asked))
    }

    pub(super) fn elapsed_us(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_micros()).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pause_moves_both_deadlines() {
        let (started, pause) = (Instant::now(), Duration::from_secs(60));
        let (limit, asked) = (Duration::from_millis(500), Duration::from_millis(200));
        let mut time = TurnTime::new(started, Some(started + asked));
        assert_eq!((time.deadline(500), time.deadline(100)), (started + asked, started + asked / 2));
        time.paused(pause);
        assert_eq!(time.deadline(500), started + pause + asked);
        assert_eq!(time.elapsed_us(), 0);
        let mut unasked = TurnTime::new(started, None);
        unasked.paused(pause);
        assert_eq!(unasked.deadline(500), started + pause + limit);
    }
}
