//! The records of a journal and their encoding.

use crate::{Json, RunEvent, invocation::StoredUsage};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use skep_engine::{ModelDigest, RolledBack, Usage};

/// Records that are no progress of a turn, as patterns of SQL's `LIKE`: what it used, text without tokens, which another
/// server wrote and which is repeated after a crash, and what the caller was shown of a call without a result.
pub(crate) const NO_PROGRESS: [&str; 3] =
    ["{\"used\":%", "{\"tokens\":{\"call\":{%},\"ids\":[],%", "{\"shown\":%"];

/// Name of the call that summarizes a conversation, as journals have it. It is the only call that the host makes on
/// behalf of the guest.
pub(crate) const SUMMARIZE: &str = "summarise";

/// Identifies a call when the guest makes it again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Identity {
    pub(crate) name: String,
    /// Hash of the call's arguments.
    pub(crate) hash: u64,
}

/// One record. Its call number and whether it is shown are stored beside it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Record {
    /// Tokens that a generation produced, and the text that the caller was shown with them.
    Tokens {
        call: Identity,
        ids: Vec<u32>,
        text: String,
        /// Output that the generation had taken back by then.
        #[serde(default, skip_serializing_if = "nothing")]
        taken_back: RolledBack,
        /// The model that produces the tokens, in the first such record of a generation.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        model: Option<ModelDigest>,
    },
    /// A call that must not be made twice is about to be made.
    Dispatched {
        call: Identity,
        /// Number of the guest's call on whose behalf the host makes this one.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        parent: Option<u32>,
    },
    /// A generation has used so much of a model so far, which counts if it never ends. An attempt is one request to a
    /// server; a generation that continues token for token is one attempt.
    Used {
        call: Identity,
        attempt: u32,
        model: String,
        #[serde(with = "StoredUsage")]
        usage: Usage,
    },
    /// The guest read this many bytes of a generation's text (0 at its end), after making `made`
    /// calls.
    Read { call: Identity, bytes: usize, made: u32 },
    /// The result of a call, and how many calls the guest had made by then.
    Result {
        call: Identity,
        value: Json,
        #[serde(default)]
        made: u32,
    },
    /// An event of a running call that the caller was shown.
    Shown { call: Identity, event: RunEvent },
    /// Any other event that the caller was shown.
    Event(RunEvent),
}

impl Identity {
    /// Returns whether the host makes this call on behalf of one of the guest's.
    pub(super) fn is_of_host(&self) -> bool {
        self.name == SUMMARIZE
    }

    pub(crate) fn new(name: &str, arguments: &impl Serialize) -> Self {
        let mut hasher = Sha256::new();
        serde_json::to_writer(&mut hasher, arguments).expect("arguments of host calls always serialize");
        Identity { name: name.to_owned(), hash: first_u64(&hasher.finalize()) }
    }
}

impl Record {
    pub(super) fn encode(&self) -> Vec<u8> {
        serde_json::to_vec(self).expect("strings, numbers and JSON values always serialize")
    }

    pub(super) fn decode(body: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(body)
    }

    /// Returns whether the caller has been shown some of an answer that is not void after this record, if the record changes
    /// that.
    pub(super) fn shows_answer(&self) -> Option<bool> {
        match self {
            Record::Tokens { text, .. } if !text.is_empty() => Some(true),
            Record::Shown { event: RunEvent::Thinking { .. }, .. } => Some(true),
            Record::Shown { event: RunEvent::GenerationRestarted, .. } => Some(false),
            _ => None,
        }
    }

    /// Returns the event that this record shows to the caller.
    pub(super) fn event(&self) -> Option<RunEvent> {
        match self {
            Record::Tokens { text, .. } if !text.is_empty() => Some(RunEvent::Delta { text: text.clone() }),
            Record::Event(event) | Record::Shown { event, .. } => Some(event.clone()),
            Record::Tokens { .. }
            | Record::Dispatched { .. }
            | Record::Used { .. }
            | Record::Read { .. }
            | Record::Result { .. } => None,
        }
    }
}

fn nothing(taken_back: &RolledBack) -> bool {
    *taken_back == RolledBack::default()
}

pub(super) fn first_u64(digest: &[u8]) -> u64 {
    digest.iter().take(8).fold(0, |word, byte| word << 8 | u64::from(*byte))
}
