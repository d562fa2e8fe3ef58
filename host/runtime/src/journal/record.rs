//! What the records of a journal say, and how they are written.

use crate::{Json, RunEvent};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use skep_engine::{ModelDigest, TakenBack};

/// A summary of a conversation, the only call that the host makes by itself.
pub(crate) const SUMMARISE: &str = "summarise";

/// What a call is recognised by when the guest makes it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) name: String,
    /// Of the call's arguments.
    pub(crate) hash: u64,
}

/// One record. Its call and whether it is shown stand beside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Record {
    /// Tokens that a generation produced, and the text that the caller was shown with them.
    Tokens {
        call: Identity,
        ids: Vec<u32>,
        text: String,
        /// What the generation had taken back by then.
        #[serde(default, skip_serializing_if = "nothing")]
        taken_back: TakenBack,
        /// The model that produces them: in the first such record of a generation.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        model: Option<ModelDigest>,
    },
    /// A call that may not be made twice is about to be made.
    Dispatched {
        call: Identity,
        /// The guest's call for which the host makes it.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<u32>,
    },
    /// The guest read so many bytes of the text of a generation, or with 0 its end, and how many calls it had made by then.
    Read { call: Identity, bytes: usize, made: u32 },
    /// What a call came to, and how many calls the guest had made by then.
    Result {
        call: Identity,
        value: Json,
        #[serde(default)]
        made: u32,
    },
    /// What the caller was shown of a call that goes on.
    Shown { call: Identity, event: RunEvent },
    /// Something else that the caller was shown.
    Event(RunEvent),
}

impl Identity {
    /// Whether it is of a call that the host makes for one of the guest's.
    pub(super) fn is_of_host(&self) -> bool {
        self.name == SUMMARISE
    }

    pub(crate) fn new(name: &str, arguments: &impl Serialize) -> Self {
        let mut hasher = Sha256::new();
        serde_json::to_writer(&mut hasher, arguments).expect("arguments of host calls are always JSON");
        Identity { name: name.to_owned(), hash: first_u64(&hasher.finalize()) }
    }
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings, numbers and JSON are always JSON")
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(body)
    }

    /// What the caller is shown of it.
    pub(super) fn event(&self) -> Option<RunEvent> {
        match self {
            Record::Tokens { text, .. } if !text.is_empty() => Some(RunEvent::Delta { text: text.clone() }),
            Record::Event(event) | Record::Shown { event, .. } => Some(event.clone()),
            Record::Tokens { .. }
            | Record::Dispatched { .. }
            | Record::Read { .. }
            | Record::Result { .. } => None,
        }
    }
}

fn nothing(taken_back: &TakenBack) -> bool {
    *taken_back == TakenBack::default()
}

pub(super) fn first_u64(digest: &[u8]) -> u64 {
    digest.iter().take(8).fold(0, |word, byte| word << 8 | u64::from(*byte))
}
