//! Stored responses of models and agents, which clients read again and later requests continue.
//!
//! A response ends in one of three ways: its client waited for it, so that it is stored with its answer; a batch with
//! the same id produces it in the background; or a turn of an agent does.

use super::{BatchAnswer, Context, RESPONSE_PREFIX};
use crate::{RuntimeError, error::known_code, session::StoredFailure, tenancy::TENANT_SHARE};
use serde::{Deserialize, Serialize};
use skep_store::{ResponseRoom, ResponseRow, ResponseState};

pub use skep_store::ResponseTurn;

/// Maximum number of responses that one request continues.
pub const MAX_CHAIN: u64 = 1_000;

/// A response to be stored.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct NewResponse {
    /// An id that [`response_id`] has returned.
    pub id: String,
    pub principal: String,
    /// Id of the response that this one continues.
    pub previous: Option<String>,
    /// The name that all responses of a chain share.
    pub thread: String,
    /// The turn of the agent that responds. A request that waits has none yet.
    #[serde(skip)]
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

impl StoredResponse {
    /// Returns the approximate size of the request and the answer.
    pub fn bytes(&self) -> usize {
        let answer = match &self.phase {
            ResponsePhase::Ended { end: ResponseEnd::Done(answer), .. } => {
                answer.text.len() + answer.reasoning.len() + answer.raw.len()
            }
            _ => 0,
        };
        self.request.len() + answer
    }
}

/// The progress of a response.
#[derive(Clone, Debug)]
pub enum ResponsePhase {
    /// The request waits for its batch or its turn to start.
    Queued,
    /// The answer is being produced.
    Running,
    /// The response has ended and does not change anymore.
    Ended { at_ms: u64, end: ResponseEnd },
}

/// The end of a response.
#[derive(Clone, Debug)]
pub enum ResponseEnd {
    /// The response has an answer.
    Done(Box<BatchAnswer>),
    /// The request failed permanently.
    Failed { code: &'static str, message: String },
    /// The response was cancelled before it had an answer.
    Cancelled,
}

/// Returns a new id. It has this prefix and 32 hexadecimal digits.
pub fn response_id() -> String {
    format!("{RESPONSE_PREFIX}{}", uuid::Uuid::now_v7().simple())
}

fn room(context: &Context) -> ResponseRoom {
    let share = context.tenancy.has_several().then_some(TENANT_SHARE as u64);
    ResponseRoom { bytes: context.responses.max_stored_bytes, share }
}

/// Fails if there is no room now for a response without its answer.
pub(crate) async fn check_room(context: &Context, new: &NewResponse) -> Result<(), RuntimeError> {
    let room = room(context);
    match context.store.has_response_room(&new.principal, new.request.len() as u64, room).await? {
        true => Ok(()),
        false => Err(RuntimeError::ResponsesFull { most: room.bytes }),
    }
}

/// Stores a response with its answer, or one whose answer is being produced.
pub(crate) async fn put(
    context: &Context,
    new: NewResponse,
    answer: Option<&BatchAnswer>,
) -> Result<(), RuntimeError> {
    let NewResponse { id, principal, previous, thread, turn, request } = new;
    let room = room(context);
    let (at_ms, answer) = (context.clock.now_ms(), answer.map(encode));
    let row = skep_store::NewResponse { id, principal, previous, thread, turn, at_ms, request, answer };
    match context.store.put_response(row, room).await? {
        true => Ok(()),
        false => Err(RuntimeError::ResponsesFull { most: room.bytes }),
    }
}

/// Returns the answer of a response that has one.
pub(crate) fn answer(row: &ResponseRow) -> Result<Option<BatchAnswer>, RuntimeError> {
    match &row.state {
        ResponseState::Done(answer) => decode(&row.id, answer).map(Some),
        _ => Ok(None),
    }
}

fn decode(id: &str, answer: &[u8]) -> Result<BatchAnswer, RuntimeError> {
    serde_json::from_slice(answer).map_err(|error| RuntimeError::Internal {
        message: format!("the stored answer of {id} is unreadable: {error}"),
    })
}

fn encode(answer: &BatchAnswer) -> Vec<u8> {
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
    let end = match state {
        ResponseState::Open => None,
        ResponseState::Done(answer) => Some(ResponseEnd::Done(Box::new(decode(&id, &answer)?))),
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
