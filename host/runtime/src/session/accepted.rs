//! A message that was accepted: what is stored of it, and the turns that follow from it while they are in memory.

use crate::{Invocation, Json, Origin, RuntimeError, feed::Feed, json::same_but_for_blanks};
use serde::{Deserialize, Serialize};
use skep_engine::Priority;
use skep_store::{TurnKey, TurnRow, TurnState};
use std::{
    collections::{HashMap, hash_map::Entry},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// What a turn is about.
pub(crate) enum Message {
    Here {
        invocation: Box<Invocation>,
        received_at_ms: u64,
        standing: Standing,
    },
    /// It is read when the turn begins: what waits takes no memory for it.
    Stored(TurnKey),
}

/// How a turn stands in the store when its session gets it.
pub(crate) enum Standing {
    /// It is not there: it is written when it starts, and ends with its caller.
    Attached,
    /// It waits there, and goes on without its caller.
    Waiting { key: TurnKey, seed: Vec<u8> },
    /// It ran, with this component, before the host was started again.
    CutOff { key: TurnKey, seed: Vec<u8>, digest: String },
}

/// What makes a turn run again as it ran, beside its seed.
#[derive(Deserialize)]
pub(crate) struct Input {
    principal: String,
    text: String,
    data: Option<Json>,
    origin: Origin,
    /// Gives way to others. What was stored before there was such work has none of it.
    #[serde(default)]
    is_background: bool,
}

/// The same, as it is written.
#[derive(Serialize)]
struct WrittenInput<'a> {
    principal: &'a str,
    text: &'a str,
    data: Option<&'a Json>,
    origin: &'a Origin,
    is_background: bool,
}

/// The feeds of all turns that wait or run in this process, by the ids of the turns.
#[derive(Default)]
pub(crate) struct LiveTurns {
    feeds: Mutex<HashMap<String, Arc<Feed>>>,
    /// Of the turns under which a part of the host panicked, how often. That is a fault, and rare.
    panics: Mutex<HashMap<String, u32>>,
}

/// While a turn lives, it has this, and nobody else runs it or ends it in the store.
pub(crate) struct Live {
    turns: Arc<LiveTurns>,
    id: String,
}

impl Message {
    /// Whether the turn ends with its caller.
    pub(crate) fn is_attached(&self) -> bool {
        matches!(self, Message::Here { standing: Standing::Attached, .. })
    }

    /// What the store has of an open turn. The error is of a message that cannot be read.
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
        serde_json::to_vec(&input).expect("strings and JSON are always JSON")
    }

    /// Whether this is the message that was stored. A client may write the same JSON with other blanks the next time.
    pub(crate) fn is_same(stored: &[u8], invocation: &Invocation) -> bool {
        let sent = Self::encode(invocation);
        let values = |input: &[u8]| serde_json::from_slice::<serde_json::Value>(input).ok();
        // Early versions stored numbers and letters in a spelling of their own.
        stored == sent || same_but_for_blanks(stored, &sent) || values(stored) == values(&sent)
    }

    /// The invocation of a turn that is run without its caller.
    pub(crate) fn decode(
        body: &[u8],
        agent: String,
        session: String,
        idempotency_key: Option<String>,
    ) -> Result<Invocation, RuntimeError> {
        let input = serde_json::from_slice(body).map_err(|error| RuntimeError::Internal {
            message: format!("the message of a turn of session {agent}/{session} is unreadable: {error}"),
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
    /// `None`: the turn lives already.
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

    /// How often a part of the host panicked under a turn.
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
