//! Stored responses of models and agents, which clients read again and later requests continue.
//!
//! A response ends in one of three ways: its client waited for it, so that it is stored with its answer; a batch with
//! the same id produces it in the background; or a turn of an agent does.

use crate::{BatchAnswer, RuntimeError, batch::RESPONSE_PREFIX, error::known_code, session::StoredFailure};
use skep_store::{ResponseRow, ResponseState};

pub use skep_store::ResponseTurn;

/// Maximum number of responses that one request continues.
pub const MAX_CHAIN: u64 = 1_000;

/// A response to be stored.
#[derive(Clone, Debug)]
pub struct NewResponse {
    /// An id that [`response_id`] has returned.
    pub id: String,
    pub principal: String,
    /// Id of the response that this one continues.
    pub previous: Option<String>,
    /// The name that all responses of a chain share.
    pub thread: String,
    /// The turn of the agent that responds.
    pub turn: Option<ResponseTurn>,
    /// The client's request, which is not interpreted here.
    pub request: Vec<u8>,
}

/// A stored response.
#[derive(Clone, Debug)]
pub struct StoredResponse {
    pub id: String,
    pub previous: Option<String>,
    pub thread: String,
    pub turn: Option<ResponseTurn>,
    pub created_at_ms: u64,
    pub request: Vec<u8>,
    pub phase: ResponsePhase,
}

#[derive(Clone, Debug)]
pub enum ResponsePhase {
    Queued,
    Running,
    Ended { at_ms: u64, end: ResponseEnd },
}

#[derive(Clone, Debug)]
pub enum ResponseEnd {
    Done(Box<BatchAnswer>),
    Failed { code: &'static str, message: String },
    Cancelled,
}

/// Returns a new id. It has this prefix and 32 hexadecimal digits.
pub fn response_id() -> String {
    format!("{RESPONSE_PREFIX}{}", uuid::Uuid::now_v7().simple())
}

pub(crate) fn encode(answer: &BatchAnswer) -> Vec<u8> {
    serde_json::to_vec(answer).expect("plain data always serializes")
}

/// Returns the state to store for the end of an agent's turn.
pub(crate) fn state_of(result: Result<BatchAnswer, RuntimeError>) -> ResponseState {
    match result {
        Ok(answer) => ResponseState::Done(encode(&answer)),
        Err(RuntimeError::Cancelled | RuntimeError::TurnFailed { code: "cancelled", .. }) => {
            ResponseState::Cancelled
        }
        Err(error) => ResponseState::Failed(StoredFailure::encode(&error)),
    }
}

/// Returns a response from its row, or with `open` if its answer is still being produced.
pub(crate) fn stored(row: ResponseRow, open: ResponsePhase) -> Result<StoredResponse, RuntimeError> {
    let ResponseRow { id, previous, thread, turn, created_at_ms, ended_at_ms, request, state } = row;
    let unreadable = |error: serde_json::Error| RuntimeError::Internal {
        message: format!("the stored answer of {id} is unreadable: {error}"),
    };
    let end = match state {
        ResponseState::Open => None,
        ResponseState::Done(answer) => {
            Some(ResponseEnd::Done(Box::new(serde_json::from_slice(&answer).map_err(unreadable)?)))
        }
        ResponseState::Failed(error) => {
            let StoredFailure { code, message } = StoredFailure::decode(&error)?;
            Some(ResponseEnd::Failed { code: known_code(&code), message })
        }
        ResponseState::Cancelled => Some(ResponseEnd::Cancelled),
    };
    let at_ms = ended_at_ms.unwrap_or(created_at_ms);
    let phase = end.map_or(open, |end| ResponsePhase::Ended { at_ms, end });
    Ok(StoredResponse { id, previous, thread, turn, created_at_ms, request, phase })
}
