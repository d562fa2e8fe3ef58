//! Runs a turn of a session that the courier itself requested.

use super::{backoff::Backoff, permits::Permit};
use crate::{BudgetUsedUp, Invocation, RuntimeError, dispatch::Dispatch};
use std::sync::Weak;

/// Delays before the retries of an event to an agent, and of an alarm: two seconds, then each time twice as long, up to ten minutes.
pub(super) const TURN_BACKOFF: Backoff = Backoff { first_ms: 2_000, factor: 2, most_ms: 600_000 };
/// Pause after an attempt to call an agent that is unavailable.
const UNAVAILABLE_MS: u64 = 10_000;

/// The result of the turn.
pub(super) enum Verdict {
    /// The turn is committed, and the row is settled.
    Done,
    Failed(RuntimeError),
    /// The failure was not caused by the agent and does not count as an attempt.
    NotNow {
        error: RuntimeError,
        wait_ms: u64,
    },
    /// The host is shutting down. The next host process resumes started rows.
    HostEnds,
}

/// Runs the turn. It releases its permit while it, or the turn ahead of it, only waits for people.
pub(super) async fn take(dispatch: &Weak<Dispatch>, invocation: Invocation, permit: Permit) -> Verdict {
    let Some(dispatch) = dispatch.upgrade() else { return Verdict::HostEnds };
    let taken = dispatch.invoke_as_host(invocation).await;
    let is_open = || dispatch.host.shutdown.admit().is_ok();
    let result = match taken {
        Ok(run) => {
            let mut idle = run.idle_watch();
            let outcome = run.outcome();
            tokio::pin!(outcome);
            tokio::select! {
                ended = &mut outcome => ended,
                () = idle.begins() => {
                    drop(permit);
                    outcome.await
                }
            }
        }
        Err(error) => Err(error),
    };
    match result {
        Ok(_) => Verdict::Done,
        Err(_) if !is_open() => Verdict::HostEnds,
        Err(error) => match &error {
            RuntimeError::MailboxFull { retry_after_ms, .. }
            | RuntimeError::IntakeFull { retry_after_ms, .. }
            | RuntimeError::TooManyTurns { retry_after_ms, .. }
            | RuntimeError::RefusedElsewhere { retry_after_ms: Some(retry_after_ms), .. }
            | RuntimeError::BudgetUsedUp(BudgetUsedUp { retry_after_ms, .. }) => {
                let wait_ms = u64::from(*retry_after_ms);
                Verdict::NotNow { error, wait_ms }
            }
            RuntimeError::AgentNotFound { .. }
            | RuntimeError::Component { .. }
            | RuntimeError::Store(_)
            | RuntimeError::HeldSinceRestore { .. }
            | RuntimeError::SessionElsewhere { .. }
            | RuntimeError::RefusedElsewhere { .. }
            | RuntimeError::TurnFailed { code: "host_gone", .. }
            | RuntimeError::ShuttingDown => Verdict::NotNow { error, wait_ms: UNAVAILABLE_MS },
            _ => Verdict::Failed(error),
        },
    }
}
