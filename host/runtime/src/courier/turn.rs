//! One turn of a session that nobody but the courier asked for.

use super::{backoff::Backoff, places::Place};
use crate::{Invocation, RuntimeError, TokensUsedUp, agent_host::WeakHost};

/// From two seconds on, as long as the tries last.
pub(super) const TURN_BACKOFF: Backoff = Backoff { first_ms: 2_000, factor: 2, most_ms: 600_000 };
/// How long to leave an agent alone that cannot be called.
const UNAVAILABLE_MS: u64 = 10_000;

/// What came of it.
pub(super) enum Verdict {
    /// It is committed, and the row is settled.
    Done,
    Failed(RuntimeError),
    /// It was not the agent's fault; this does not count as a try.
    NotNow {
        error: RuntimeError,
        wait_ms: u64,
    },
    /// The host ends. What has begun is begun again by the next one.
    HostEnds,
}

/// Runs the turn. While it, or the one in front of it, only waits for people, it takes nobody's place.
pub(super) async fn take(host: &WeakHost, invocation: Invocation, place: Place) -> Verdict {
    let Some(host) = host.upgrade() else { return Verdict::HostEnds };
    let taken = host.invoke_as_host(invocation).await;
    let is_open = || host.services().admit().is_ok();
    let result = match taken {
        Ok(run) => {
            let idle = run.idles();
            let outcome = run.outcome();
            tokio::pin!(outcome);
            tokio::select! {
                ended = &mut outcome => ended,
                () = idle => {
                    drop(place);
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
            | RuntimeError::TokensUsedUp(TokensUsedUp { retry_after_ms, .. }) => {
                let wait_ms = u64::from(*retry_after_ms);
                Verdict::NotNow { error, wait_ms }
            }
            RuntimeError::AgentNotFound { .. }
            | RuntimeError::Component { .. }
            | RuntimeError::Store(_)
            | RuntimeError::HeldSinceRestore { .. }
            | RuntimeError::ShuttingDown => Verdict::NotNow { error, wait_ms: UNAVAILABLE_MS },
            _ => Verdict::Failed(error),
        },
    }
}
