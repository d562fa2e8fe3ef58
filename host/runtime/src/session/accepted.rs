//! Accepted messages: what is stored of them, and the turns in memory that they start.

use crate::{Invocation, Json, Origin, RuntimeError, feed::Feed, json::same_but_for_blanks};
use serde::{Deserialize, Serialize};
use skep_engine::Priority;
use skep_store::{TurnKey, TurnRow, TurnState};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// The message of a turn.
pub(crate) enum Message {
    Here {
        invocation: Box<Invocation>,
        received_at_ms: u64,
        standing: Standing,
    },
    /// The message is read when the turn starts, so that a waiting turn uses no memory for it.
    Stored(TurnKey),
}

/// State of a turn in the store when its session receives it.
pub(crate) enum Standing {
    /// The turn is not stored yet. It is written when it starts, and ends when its caller goes
    /// away.
    Attached,
    /// The turn is stored and waiting. It continues without its caller.
    Waiting { key: TurnKey, seed: Vec<u8> },
    /// The turn is stored and was interrupted. It ran with this component digest before the host
    /// restarted, or until it was parked.
    CutOff { key: TurnKey, seed: Vec<u8>, digest: String },
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
}

/// `Input` in borrowed form, for writing.
#[derive(Serialize)]
struct WrittenInput<'a> {
    principal: &'a str,
    text: &'a str,
    data: Option<&'a Json>,
    origin: &'a Origin,
    is_background: bool,
}

/// The feeds of all turns that wait or run in this process, by turn id.
#[derive(Default)]
pub(crate) struct LiveTurns {
    feeds: Mutex<HashMap<String, Arc<Feed>>>,
    /// Number of host panics under each turn. Panics are bugs, and rare.
    panics: Mutex<HashMap<String, u32>>,
}

/// Held while a turn is alive. As long as it exists, nobody else runs the turn or ends it in the
/// store.
pub(crate) struct Live {
    turns: Arc<LiveTurns>,
    id: String,
}

impl Message {
    /// Returns whether the turn ends when its caller goes away.
    pub(crate) fn is_attached(&self) -> bool {
        matches!(self, Message::Here { standing: Standing::Attached, .. })
    }

    /// Reads the message of an open turn from its row. Fails if the message cannot be decoded.
    pub(crate) fn read(row: TurnRow) -> Result<Message, RuntimeError> {
        let TurnRow {
            key, agent, session, digest, input, seed, idempotency_key, accepted_at_ms, state, ..
        } = row;
        let standing = match state {
            TurnState::Waiting => Standing::Waiting { key, seed },
            _ => Standing::CutOff { key, seed, digest },
        };
        let invocation = Box::new(Input::decode(&input, agent, session, idempotency_key)?);
        Ok(Message::Here { invocation, received_at_ms: accepted_at_ms, standing })
    }
}

impl Standing {
    pub(crate) fn key(&self) -> Option<TurnKey> {
        match self {
            Standing::Attached => None,
            Standing::Waiting { key, .. } | Standing::CutOff { key, .. } => Some(*key),
        }
    }
}

impl Input {
    pub(crate) fn encode(invocation: &Invocation) -> Vec<u8> {
        let Invocation { principal, text, data, origin, priority, .. } = invocation;
        let is_background = *priority == Priority::Background;
        let input = WrittenInput { principal, text, data: data.as_ref(), origin, is_background };
        serde_json::to_vec(&input).expect("strings and JSON values always serialize")
    }

    /// Returns whether `invocation` is the message that was stored. A client may send the same JSON
    /// with different whitespace the next time.
    pub(crate) fn is_same(stored: &[u8], invocation: &Invocation) -> bool {
        let sent = Self::encode(invocation);
        let values = |input: &[u8]| serde_json::from_slice::<serde_json::Value>(input).ok();
        // Early versions stored numbers and characters in a different spelling, so values are
        // compared too.
        stored == sent || same_but_for_blanks(stored, &sent) || values(stored) == values(&sent)
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
        let Input { principal, text, data, origin, is_background } = input;
        Ok(Invocation {
            principal,
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

impl LiveTurns {
    /// Registers a turn as alive. Returns `None` if it already is.
    pub(crate) fn enter(self: &Arc<Self>, feed: &Arc<Feed>) -> Option<Arc<Live>> {
        let id = feed.turn_id().to_owned();
        match self.lock().entry(id.clone()) {
            Entry::Occupied(_) => None,
            Entry::Vacant(place) => {
                place.insert(feed.clone());
                Some(Arc::new(Live { turns: self.clone(), id }))
            }
        }
    }

    pub(crate) fn get(&self, id: &str) -> Option<Arc<Feed>> {
        self.lock().get(id).cloned()
    }

    /// Returns how often a part of the host panicked under a turn.
    pub(crate) fn panics(&self, id: &str) -> u32 {
        let panics = self.panics.lock().unwrap_or_else(PoisonError::into_inner);
        panics.get(id).copied().unwrap_or_default()
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Arc<Feed>>> {
        self.feeds.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        self.turns.lock().remove(&self.id);
        if std::thread::panicking() {
            let mut panics = self.turns.panics.lock().unwrap_or_else(PoisonError::into_inner);
            *panics.entry(self.id.clone()).or_default() += 1;
        }
    }
}
