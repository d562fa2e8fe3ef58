//! Exported sessions, and their validation before import, because an export may come from anywhere.

use crate::{
    Limits, RuntimeError, SessionId, SessionSummary,
    capability::{StoredConversation, check_conversation, check_size, state},
};
use skep_engine::{Model, ModelDigest, ModelSet, chat::Transcript};
use skep_store::{ConversationRow, SessionRow, SessionSnapshot};
use std::collections::BTreeMap;

/// Maximum size of an exported session's state and conversations.
pub(crate) const MAX_PORTABLE_BYTES: u64 = 32 << 20;
const MAX_TURNS: u64 = 1 << 48;

/// A complete session.
#[derive(Clone, Debug, PartialEq)]
pub struct PortableSession {
    pub summary: SessionSummary,
    /// State values by key.
    pub state: BTreeMap<String, Vec<u8>>,
    pub conversations: Vec<PortableConversation>,
}

/// A conversation of an exported session.
#[derive(Clone, Debug, PartialEq)]
pub struct PortableConversation {
    pub name: String,
    /// Name of the model that the conversation uses.
    pub model: String,
    /// Digest of the model that produced the transcript's tokens, if known.
    pub digest: Option<ModelDigest>,
    pub transcript: Transcript,
}

impl PortableSession {
    /// Validates the session and builds its rows, as if its last turn had been committed at
    /// `now_ms`.
    pub(crate) fn into_snapshot(
        self,
        limits: &Limits,
        models: &ModelSet,
        now_ms: u64,
    ) -> Result<SessionSnapshot, RuntimeError> {
        let invalid = |message: String| RuntimeError::InvalidSession { message };
        let SessionSummary { id, turns, created_at_ms, .. } = self.summary;
        SessionId::new(&id)?;
        if !(1..=MAX_TURNS).contains(&turns) {
            return Err(invalid(format!("turns is {turns}; it may be 1 to {MAX_TURNS}")));
        }
        state::check(&self.state, limits).map_err(invalid)?;
        let mut rows: BTreeMap<String, ConversationRow> = BTreeMap::new();
        for conversation in self.conversations {
            let PortableConversation { name, model, digest, mut transcript } = conversation;
            let at = |why: String| invalid(format!("conversation {name:?}: {why}"));
            if rows.contains_key(&name) {
                return Err(at("the name is used twice".into()));
            }
            check_conversation(&name, rows.len(), transcript.messages()).map_err(at)?;
            let served = models.find(Some(&model)).map_err(|unknown| at(unknown.to_string()))?.loaded();
            let is_same = |served: &Model| digest.as_ref().is_none_or(|digest| digest == served.digest());
            // The tokens of a different model with this name, or of one that is not loaded, are
            // meaningless here, but the messages remain valid.
            match served.as_ref().filter(|served| is_same(served)).and_then(Model::engine) {
                Some(engine) => transcript.check(engine).map_err(at)?,
                None => transcript.forget_tokens(),
            }
            let digest = served.map(|served| served.digest().clone());
            let stored = StoredConversation { model, digest, transcript };
            rows.insert(name.clone(), stored.row(&name)?);
        }
        let state = state::state_bytes(&self.state);
        let conversations: usize = rows.values().map(|row| row.body.len()).sum();
        check_size(0, state + conversations, limits.session_kb)?;
        let created_at_ms = created_at_ms.min(now_ms);
        Ok(SessionSnapshot {
            row: SessionRow { session: id, turns, created_at_ms, updated_at_ms: now_ms },
            state: self.state.into_iter().collect(),
            conversations: rows.into_values().collect(),
        })
    }
}
