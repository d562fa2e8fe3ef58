//! The combined size of a session's state and conversations while a turn adds to them.
//!
//! The exact size is known and checked when the turn is written. Until then, this bounds the memory of the turn.

use crate::RuntimeError;
use std::sync::atomic::{AtomicUsize, Ordering};

/// The size budget of one session during a turn.
#[derive(Debug)]
pub(crate) struct SessionQuota {
    limit_kb: u32,
    used: AtomicUsize,
}

/// A budget of zero, for contexts without a session.
impl Default for SessionQuota {
    fn default() -> Self {
        SessionQuota::new(0, 0)
    }
}

impl SessionQuota {
    pub(crate) fn new(limit_kb: u32, used: usize) -> Self {
        SessionQuota { limit_kb, used: AtomicUsize::new(used) }
    }

    /// Counts bytes that are about to be added. Fails without counting them if they do not fit.
    pub(super) fn take(&self, bytes: usize) -> Result<(), String> {
        let limit = self.limit_kb as usize * 1024;
        let fits = |used: usize| used.checked_add(bytes).filter(|sum| *sum <= limit);
        match self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, fits) {
            Ok(_) => Ok(()),
            Err(used) => Err(full(used.saturating_add(bytes), self.limit_kb)),
        }
    }

    /// Counts a change that has already happened, even if it exceeds the limit.
    pub(super) fn replace(&self, before: usize, after: usize) {
        self.used.fetch_add(after, Ordering::AcqRel);
        self.used.fetch_sub(before, Ordering::AcqRel);
    }
}

/// Checks that a session may grow to this size. A session that already exceeds the limit may only shrink.
pub(crate) fn check_size(before: usize, after: usize, limit_kb: u32) -> Result<(), RuntimeError> {
    if after <= before.max(limit_kb as usize * 1024) {
        return Ok(());
    }
    Err(RuntimeError::LimitExceeded { limit: "session_kb", message: full(after, limit_kb) })
}

fn full(bytes: usize, limit_kb: u32) -> String {
    format!(
        "the session's state and conversations would take {bytes} bytes, but `session_kb` allows {limit_kb} KiB; clear or compact \
         a conversation, delete state, or raise `session_kb` under [limits] in agent.toml, up to the operator's ceiling in \
         skep.toml"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_that_do_not_fit_are_not_counted_and_shrinking_makes_room() {
        let quota = SessionQuota::new(1, 1_000);
        let message = quota.take(25).expect_err("one byte too many");
        assert!(message.contains("would take 1025 bytes, but `session_kb` allows 1 KiB"), "{message}");
        quota.take(24).expect("it fits exactly");
        quota.replace(500, 0);
        quota.take(500).expect("there is room again");
        quota.take(usize::MAX).expect_err("the sum does not overflow");
    }

    #[test]
    fn a_session_over_the_limit_may_shrink() {
        check_size(0, 1_024, 1).expect("exactly the limit");
        let error = check_size(1_024, 1_025, 1).expect_err("one byte over it");
        assert!(matches!(error, RuntimeError::LimitExceeded { limit: "session_kb", .. }));
        check_size(5_000, 4_999, 1).expect("it was larger before");
    }
}
