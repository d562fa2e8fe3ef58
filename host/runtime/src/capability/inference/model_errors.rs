//! Errors of asking for a model, such as that it is being loaded. They depend on the moment, so a rerun guest has to see
//! them again, and must not see others.
//!
//! Only an error is a call in the journal: a guest that gets its model repeats that by itself.

use crate::{
    bindings::types::Error,
    capability::turn::Turn,
    journal::{Identity, Stopped},
};
use std::time::Duration;
use tokio::time::sleep;

/// Maximum pause before a rerun guest's model is asked for again.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns the error that this call had before a restart.
pub(super) fn before(turn: &Turn, asked: &Identity) -> Result<Option<Error>, Stopped> {
    turn.journal.failed_before(asked)
}

/// Waits if the call must be tried again, because it did not fail before the restart, and returns whether it must be.
pub(super) async fn waits(turn: &Turn, error: &Error) -> bool {
    let Error::Busy(retry_after_ms) = error else { return false };
    let waits = turn.journal.is_replaying();
    if waits {
        sleep(PAUSE.min(Duration::from_millis((*retry_after_ms).into()))).await;
    }
    waits
}

/// Journals an error that the guest sees for the first time. One that is not in the journal of a turn that is rerun may
/// have been seen under an earlier version, which journaled none.
pub(super) fn note(turn: &Turn, asked: Identity, error: &Error) -> Result<(), Stopped> {
    if !turn.journal.is_replaying() {
        let call = turn.journal.call(asked)?;
        turn.journal.ended(&call, error, Vec::new());
    }
    Ok(())
}
