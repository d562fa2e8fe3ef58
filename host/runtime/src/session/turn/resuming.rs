//! Resuming: the actor owns a turn that only the store holds, and reads its message.

use super::{Run, State, ended::Ended, failing::Failing, opening::Opening};
use crate::{RuntimeError, journal, session::message::Accepted};
use skep_store::{StoreError, TurnKey, TurnRow, TurnState};
use std::time::Instant;

/// A turn whose message is in the store.
///
/// Durable: the turn's row, whatever it says. Another owner may have ended the turn or deleted it
/// before this one registered it as live, so the row is read only now.
pub(super) struct Resuming {
    pub(super) key: TurnKey,
}

impl Resuming {
    /// Goes to `Opening` with the stored message. A turn that has ended meanwhile is `Ended`, and
    /// one whose row cannot be decoded is `Failing`. If the row cannot be read, or the session or
    /// the host goes away, the turn is left open.
    pub(super) async fn resume(self, run: &mut Run<'_>) -> State {
        let Resuming { key } = self;
        let host = run.actor.host.clone();
        // Limits how many turns are resumed at once, so that the turns left by the last process do
        // not fill the memory of this one.
        let mut gone = run.actor.gone.clone();
        run.actor.resuming = tokio::select! {
            permit = host.resume_permit() => Some(permit),
            () = run.end.abandoned() => None,
            _ = gone.changed() => return Ended::LeftOpen(RuntimeError::Cancelled).into(),
            () = host.shutdown.begun() => return Ended::LeftOpen(RuntimeError::ShuttingDown).into(),
        };
        // From here on, the death of this process counts as a loss of the turn.
        if let Err(error) = host.store.mark_turn_running_here(key).await {
            return Ended::LeftOpen(error.into()).into();
        }
        let accepted = match host.store.turn_by_key(key).await {
            Ok(None) => return Ended::Failed(RuntimeError::Cancelled).into(),
            Ok(Some(row)) if !row.is_open() => return run.ended_elsewhere(row).await.into(),
            Ok(Some(row)) => Accepted::read(row),
            Err(error @ StoreError::Unreadable { .. }) => Err(error.into()),
            Err(error) => return Ended::LeftOpen(error.into()).into(),
        };
        match accepted {
            Ok(accepted) => {
                tracing::info!("resuming a turn");
                State::Opening(Opening::new(accepted, run.end.feed().turn_id(), Instant::now()))
            }
            Err(error) => {
                tracing::error!("the turn cannot be resumed and has failed: {error}");
                State::Failing(Failing::unopened(key, None, error))
            }
        }
    }
}

impl Run<'_> {
    /// Shows the followers the events of a turn that another owner ran to completion, and returns its end.
    async fn ended_elsewhere(&self, row: TurnRow) -> Ended {
        let TurnState::Done { number, .. } = row.state else { return Ended::of_row(row.state, 0) };
        let records = self.actor.host.store.records(row.key).await.map_err(RuntimeError::from);
        let shown = records.and_then(|records| journal::republish_events(self.end.feed(), number, records));
        match shown {
            Ok(last_id) => Ended::of_row(row.state, last_id),
            Err(error) => Ended::Failed(error),
        }
    }
}
