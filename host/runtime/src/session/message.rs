//! Accepted messages: where the message of a turn is, and what the store holds of it.

use crate::{
    Invocation, Json, Origin, RuntimeError, TurnMessage,
    json::{equal_ignoring_whitespace, without_whitespace},
};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use skep_engine::Priority;
use skep_store::{TurnKey, TurnRow, TurnState};
use std::time::Duration;

/// The message of a turn.
pub(crate) enum Message {
    InMemory(Accepted),
    /// The message is read when the turn starts, so that a waiting turn uses no memory for it.
    Stored(TurnKey),
}

/// An accepted message in memory.
pub(crate) struct Accepted {
    pub(crate) invocation: Box<Invocation>,
    pub(crate) received_at_ms: u64,
    pub(crate) state: StoredState,
}

/// State of a turn in the store when its session receives it.
pub(crate) enum StoredState {
    /// The turn is not stored yet. It is written when it starts, and ends when its caller goes
    /// away.
    Attached,
    /// The turn is stored and waiting. It continues without its caller.
    Waiting { key: TurnKey, seed: Vec<u8> },
    /// The turn is stored and was interrupted. It ran with this component digest before the host
    /// restarted, or until it was suspended.
    Interrupted { key: TurnKey, seed: Vec<u8>, digest: String },
}

/// The input that makes a rerun of a turn identical, apart from its seed.
#[derive(Deserialize)]
pub(crate) struct Input {
    principal: String,
    text: String,
    data: Option<Json>,
    origin: Origin,
    /// Whether the turn yields to interactive work. Rows stored before background work existed lack
    /// the field.
    #[serde(default)]
    is_background: bool,
    /// Id of the API key that sent the message. Rows stored before usage was counted by key lack the field.
    #[serde(default)]
    key: Option<String>,
}

/// `Input` in borrowed form, for writing.
#[derive(Serialize)]
struct WrittenInput<'a> {
    principal: &'a str,
    text: &'a str,
    data: Option<&'a Json>,
    origin: &'a Origin,
    is_background: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    key: Option<&'a str>,
}

/// The key of a stored message.
#[derive(Deserialize)]
struct KeyOf {
    #[serde(default)]
    key: Option<String>,
}

impl Message {
    /// Returns whether the turn ends when its caller goes away.
    pub(crate) fn is_attached(&self) -> bool {
        matches!(self, Message::InMemory(Accepted { state: StoredState::Attached, .. }))
    }

    /// Moves the deadline that the caller has set, if there is one, because the caller's clock stood still.
    pub(super) fn extend_deadline(&mut self, pause: Duration) {
        if let Message::InMemory(Accepted { invocation, .. }) = self
            && let Some(deadline) = &mut invocation.deadline
        {
            *deadline += pause;
        }
    }
}

impl Accepted {
    /// Reads the message of an open turn from its row. Fails if the message cannot be decoded.
    pub(crate) fn read(row: TurnRow) -> Result<Self, RuntimeError> {
        let TurnRow {
            key, agent, session, digest, input, seed, idempotency_key, accepted_at_ms, state, ..
        } = row;
        let state = match state {
            TurnState::Waiting => StoredState::Waiting { key, seed },
            _ => StoredState::Interrupted { key, seed, digest },
        };
        let invocation = Box::new(Input::decode(&input, agent, session, idempotency_key)?);
        Ok(Accepted { invocation, received_at_ms: accepted_at_ms, state })
    }
}

impl StoredState {
    /// Returns the key of the turn's row, or `None` if the turn has no row yet.
    pub(crate) fn key(&self) -> Option<TurnKey> {
        match self {
            StoredState::Attached => None,
            StoredState::Waiting { key, .. } | StoredState::Interrupted { key, .. } => Some(*key),
        }
    }
}

impl Input {
    pub(crate) fn encode(invocation: &Invocation) -> Vec<u8> {
        Self::encode_with_key(invocation, invocation.key.as_deref())
    }

    fn encode_with_key(invocation: &Invocation, key: Option<&str>) -> Vec<u8> {
        let Invocation { principal, text, data, origin, priority, .. } = invocation;
        let is_background = *priority == Priority::Background;
        let input = WrittenInput { principal, text, data: data.as_ref(), origin, is_background, key };
        serde_json::to_vec(&input).expect("strings and JSON values always serialize")
    }

    /// Returns whether `invocation` is the message that was stored. A client may send the same JSON
    /// with different whitespace and with another key of its tenant the next time.
    pub(crate) fn is_same(stored: &[u8], invocation: &Invocation) -> bool {
        let key = serde_json::from_slice::<KeyOf>(stored).ok().and_then(|stored| stored.key);
        let sent = Self::encode_with_key(invocation, key.as_deref());
        let values = |input: &[u8]| serde_json::from_slice::<serde_json::Value>(input).ok();
        // Early versions stored numbers and characters in a different spelling, so values are
        // compared too.
        stored == sent || equal_ignoring_whitespace(stored, &sent) || values(stored) == values(&sent)
    }

    /// Returns a digest of a message, which is kept longer than the message. It depends neither on the white space of JSON nor
    /// on the key of the sender.
    pub(crate) fn digest(invocation: &Invocation) -> Vec<u8> {
        let sent = Self::encode_with_key(invocation, None);
        Sha256::digest(without_whitespace(&sent).collect::<Vec<u8>>()).to_vec()
    }

    /// Decodes what was said to a turn. It leaves out a message that it cannot read.
    pub(crate) fn message(stored: &[u8]) -> Option<TurnMessage> {
        serde_json::from_slice(stored).ok()
    }

    /// Decodes the invocation of a turn that runs without its caller.
    pub(crate) fn decode(
        body: &[u8],
        agent: String,
        session: String,
        idempotency_key: Option<String>,
    ) -> Result<Invocation, RuntimeError> {
        let input = serde_json::from_slice(body).map_err(|error| RuntimeError::Internal {
            message: format!(
                "the stored message of a turn in session {agent}/{session} is unreadable: {error}"
            ),
        })?;
        let Input { principal, text, data, origin, is_background, key } = input;
        Ok(Invocation {
            principal,
            key,
            agent,
            session,
            text,
            data,
            origin,
            priority: if is_background { Priority::Background } else { Priority::Interactive },
            deadline: None,
            idempotency_key,
            detached: true,
        })
    }
}
