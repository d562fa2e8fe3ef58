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

/// The version of a digest of a message's values, which is its first byte.
const BY_VALUE: u8 = 1;
/// Length of a digest of a message's spelling, which has no version.
const SPELLING_DIGEST_BYTES: usize = 32;

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

impl<'a> WrittenInput<'a> {
    fn of(invocation: &'a Invocation, key: Option<&'a str>) -> Self {
        let Invocation { principal, text, data, origin, priority, .. } = invocation;
        let is_background = *priority == Priority::Background;
        WrittenInput { principal, text, data: data.as_ref(), origin, is_background, key }
    }
}

impl Input {
    pub(crate) fn encode(invocation: &Invocation) -> Vec<u8> {
        Self::encode_with_key(invocation, invocation.key.as_deref())
    }

    fn encode_with_key(invocation: &Invocation, key: Option<&str>) -> Vec<u8> {
        let input = WrittenInput::of(invocation, key);
        serde_json::to_vec(&input).expect("strings and JSON values always serialize")
    }

    /// Returns a message as JSON in the one spelling that its values have. The key of the sender is not part of it.
    fn values(invocation: &Invocation) -> Vec<u8> {
        let values = serde_json::to_value(WrittenInput::of(invocation, None));
        let mut values = values.expect("strings and JSON values always serialize");
        values.sort_all_objects();
        serde_json::to_vec(&values).expect("a JSON value always serializes")
    }

    /// Returns whether `invocation` is the message that was stored. A client may send the same values
    /// in another spelling and with another key of its tenant the next time.
    pub(crate) fn is_same(stored: &[u8], invocation: &Invocation) -> bool {
        let key = serde_json::from_slice::<KeyOf>(stored).ok().and_then(|stored| stored.key);
        let sent = Self::encode_with_key(invocation, key.as_deref());
        let has_its_values = |stored: Invocation| Self::values(&stored) == Self::values(invocation);
        // Values take much more memory than their text, so most messages are compared without parsing them.
        equal_ignoring_whitespace(stored, &sent)
            || Self::decode(stored, String::new(), String::new(), None).is_ok_and(has_its_values)
    }

    /// Returns a digest of a message, which is kept longer than the message. It depends on what [`Self::is_same`] compares.
    pub(crate) fn digest(invocation: &Invocation) -> Vec<u8> {
        let digest = Sha256::digest(Self::values(invocation));
        std::iter::once(BY_VALUE).chain(digest).collect()
    }

    /// Returns whether a stored digest may be that of `invocation`. A digest of a version that this host does not know may be
    /// that of any message.
    pub(crate) fn may_have_digest(invocation: &Invocation, stored: &[u8]) -> bool {
        match stored {
            // Early versions stored a digest of the spelling without white space.
            _ if stored.len() == SPELLING_DIGEST_BYTES => {
                let sent = Self::encode_with_key(invocation, None);
                Sha256::digest(without_whitespace(&sent).collect::<Vec<u8>>())[..] == *stored
            }
            [BY_VALUE, ..] => stored == Self::digest(invocation),
            _ => true,
        }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fixture::invocation;

    fn message(data: &str) -> Invocation {
        let data = Some(Json::from_text(data.to_owned()).expect("JSON"));
        Invocation { data, ..invocation("a", "s", "one") }
    }

    #[test]
    fn a_message_is_the_same_in_every_spelling_of_its_values() {
        let deepest = |value: &str| format!("{}{value}{}", "[".repeat(127), "]".repeat(127));
        let deepest = ["10.0", "1e1", "1e2"].map(deepest);
        for (first, again, other) in [
            (
                r#"{"b": 1e2, "a": {"d": "\u00e9", "c": 1}}"#,
                r#"{"a":{"c":1,"d":"é"},"b":100.0}"#,
                r#"{"a":{"c":1,"d":"é"},"b":101.0}"#,
            ),
            ("[1, 2]", "[ 1,2 ]", "[2, 1]"),
            ("{}", "{ }", "null"),
            (deepest[0].as_str(), deepest[1].as_str(), deepest[2].as_str()),
        ] {
            let by_another_key = Invocation { key: Some("second".into()), ..message(again) };
            let stored = Input::encode(&Invocation { key: Some("first".into()), ..message(first) });
            let digest = Input::digest(&message(first));
            assert!(Input::is_same(&stored, &by_another_key), "{first}");
            assert!(Input::may_have_digest(&by_another_key, &digest), "{first}");
            assert!(!Input::is_same(&stored, &message(other)), "{first}");
            assert!(!Input::may_have_digest(&message(other), &digest), "{first}");
        }
    }

    #[test]
    fn digests_of_other_versions_are_compared_as_far_as_the_version_is_known() {
        let sent = message("[1.0]");
        let spelling = Sha256::digest(Input::encode(&sent));
        assert!(Input::may_have_digest(&message("[ 1.0 ]"), &spelling));
        assert!(!Input::may_have_digest(&message("[2.0]"), &spelling));
        let mut later = Input::digest(&sent);
        later[0] += 1;
        assert!(Input::may_have_digest(&sent, &later));
    }
}
