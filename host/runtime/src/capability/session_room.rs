//! What a session's state and conversations take together, while a turn adds to them.
//!
//! The exact size is known when the turn is written, and checked there; until then this bounds the memory of the turn.

use crate::RuntimeError;
use std::sync::atomic::{AtomicUsize, Ordering};

#[derive(Debug)]
pub(crate) struct SessionRoom {
    limit_kb: u32,
    used: AtomicUsize,
}

/// A session without room, for what has no session.
impl Default for SessionRoom {
    fn default() -> Self {
        SessionRoom::new(0, 0)
    }
}

impl SessionRoom {
    pub(crate) fn new(limit_kb: u32, used: usize) -> Self {
        SessionRoom { limit_kb, used: AtomicUsize::new(used) }
    }

    /// Counts what is about to be added, if there is room for it.
    pub(super) fn take(&self, bytes: usize) -> Result<(), String> {
        let limit = self.limit_kb as usize * 1024;
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
        match self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits) {
            Ok(_) => Ok(()),
            Err(used) => Err(full(used.saturating_add(bytes), self.limit_kb)),
        }
    }

    /// Counts a change of what is there: it has happened.
    pub(super) fn replace(&self, before: usize, after: usize) {
        self.used.fetch_add(after, Ordering::AcqRel);
        self.used.fetch_sub(before, Ordering::AcqRel);
    }
}

/// Whether a session may become this large. One that was larger before, under another limit, may become smaller.
pub(crate) fn check_size(before: usize, after: usize, limit_kb: u32) -> Result<(), RuntimeError> {
    if after <= before.max(limit_kb as usize * 1024) {
        return Ok(());
    }
    Err(RuntimeError::LimitExceeded { limit: "session_kb", message: full(after, limit_kb) })
}

fn full(bytes: usize, limit_kb: u32) -> String {
    format!(
        "the session's state and conversations would take {bytes} bytes, and `session_kb` allows {limit_kb} KiB; clear or compact \
         a conversation, delete state, or raise `session_kb` under [limits] in agent.toml, up to the operator's ceiling in \
         skep.toml"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_not_counted_and_what_shrinks_makes_room() {
        let room = SessionRoom::new(1, 1_000);
        let message = room.take(25).expect_err("it is one byte too many");
        assert!(message.contains("would take 1025 bytes, and `session_kb` allows 1 KiB"), "{message}");
        room.take(24).expect("it fits exactly");
        room.replace(500, 0);
        room.take(500).expect("there is room again");
        room.take(usize::MAX).expect_err("the sum does not overflow");
    }

    #[test]
    fn a_session_over_the_limit_may_become_smaller() {
        check_size(0, 1_024, 1).expect("exactly the limit");
        let error = check_size(1_024, 1_025, 1).expect_err("one byte over it");
        assert!(matches!(error, RuntimeError::LimitExceeded { limit: "session_kb", .. }));
        check_size(5_000, 4_999, 1).expect("it was larger before");
    }
}
