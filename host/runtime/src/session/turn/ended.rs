//! Ended: how the turn ended, for its followers and for the metrics.

use super::State;
use crate::{
    Outcome, RuntimeError,
    error::known_code,
    session::{StoredFailure, decode_outcome},
};
use skep_store::TurnState;

/// The end of a turn in this process.
#[derive(Debug)]
pub(super) enum Ended {
    /// Durable: everything that the turn changed, and its outcome.
    Done {
        /// Number of the last event before the end.
        last_id: u64,
        outcome: Outcome,
    },
    /// Durable: that the turn failed and why, or nothing if the turn was never stored or has been
    /// deleted. It does not run again.
    Failed(RuntimeError),
    /// Durable: the open row and the journal, with which a later attempt or the next host continues
    /// the turn.
    LeftOpen(RuntimeError),
}

impl Ended {
    /// Returns the end of a turn that another owner ran to completion. `last_id` is the number of the last event before
    /// the end.
    pub(super) fn of_row(state: TurnState, last_id: u64) -> Self {
        match state {
            TurnState::Done { outcome, .. } => match decode_outcome(&outcome) {
                Ok(outcome) => Ended::Done { last_id, outcome },
                Err(error) => Ended::Failed(error),
            },
            TurnState::Failed { error, .. } => Ended::Failed(match StoredFailure::decode(&error) {
                Ok(StoredFailure { code, message }) => {
                    RuntimeError::TurnFailed { code: known_code(&code), message }
                }
                Err(unreadable) => unreadable,
            }),
            TurnState::Waiting | TurnState::Running { .. } => Ended::LeftOpen(RuntimeError::Cancelled),
        }
    }

    pub(super) fn error(&self) -> Option<&RuntimeError> {
        match self {
            Ended::Done { .. } => None,
            Ended::Failed(error) | Ended::LeftOpen(error) => Some(error),
        }
    }

    /// Returns the outcome as the metrics name it.
    pub(super) fn label(&self) -> &'static str {
        self.error().map_or("ok", RuntimeError::code)
    }
}

impl From<Ended> for State {
    fn from(ended: Ended) -> Self {
        State::Ended(ended)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stored_row_determines_how_the_turn_ends() {
        let outcome =
            Outcome { text: "hi".into(), data: None, turn: 3, usage: Default::default(), elapsed_us: 1 };
        let body = serde_json::to_vec(&outcome).expect("JSON");
        let ended = Ended::of_row(TurnState::Done { number: 3, outcome: body, ended_at_ms: 1 }, 5);
        assert_eq!((ended.label(), ended.error().is_none()), ("ok", true));
        assert!(matches!(ended, Ended::Done { last_id: 5, outcome: stored } if stored == outcome));

        let error = StoredFailure::encode(&RuntimeError::DeadlineExceeded);
        let ended = Ended::of_row(TurnState::Failed { error, ended_at_ms: 1 }, 0);
        assert_eq!(ended.label(), "deadline_exceeded");
        assert!(matches!(ended, Ended::Failed(RuntimeError::TurnFailed { .. })), "{ended:?}");
    }

    #[test]
    fn an_unreadable_end_is_a_failure_and_an_open_row_is_left_open() {
        let body = b"{".to_vec();
        for state in [
            TurnState::Done { number: 1, outcome: body.clone(), ended_at_ms: 1 },
            TurnState::Failed { error: body, ended_at_ms: 1 },
        ] {
            let ended = Ended::of_row(state, 0);
            assert!(matches!(ended, Ended::Failed(RuntimeError::Internal { .. })), "{ended:?}");
        }
        for state in [TurnState::Waiting, TurnState::Running { number: 1 }] {
            let ended = Ended::of_row(state, 0);
            assert!(matches!(ended, Ended::LeftOpen(RuntimeError::Cancelled)), "{ended:?}");
        }
    }
}
