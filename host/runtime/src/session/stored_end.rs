//! The end of a turn as its row holds it: the outcome, or why the turn failed.

use crate::{Outcome, RuntimeError};
use serde::{Deserialize, Serialize};

/// The stored reason why a turn failed.
#[derive(Serialize, Deserialize)]
pub(crate) struct StoredFailure {
    pub(crate) code: String,
    pub(crate) message: String,
}

impl StoredFailure {
    pub(crate) fn encode(error: &RuntimeError) -> Vec<u8> {
        let stored = StoredFailure { code: error.code().to_owned(), message: error.to_string() };
        serde_json::to_vec(&stored).expect("strings are always JSON")
    }

    pub(crate) fn decode(body: &[u8]) -> Result<Self, RuntimeError> {
        serde_json::from_slice(body).map_err(|error| RuntimeError::Internal {
            message: format!("the stored failure of a turn is unreadable: {error}"),
        })
    }
}

pub(crate) fn decode_outcome(body: &[u8]) -> Result<Outcome, RuntimeError> {
    serde_json::from_slice(body).map_err(|error| RuntimeError::Internal {
        message: format!("the stored outcome of a turn is unreadable: {error}"),
    })
}
