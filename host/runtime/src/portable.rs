//! A session as it is exported, and what must be right about it before it is imported: it may come from anywhere.

use crate::{
    Limits, RuntimeError, SessionId, SessionSummary,
    capability::{StoredConversation, check_conversation, check_size, state},
};
use skep_engine::{ModelDigest, ModelSet, chat::Transcript};
use skep_store::{ConversationRow, SessionRow, SessionSnapshot};
use std::collections::BTreeMap;

/// Of a session that is exported: its state and conversations.
pub(crate) const MAX_PORTABLE_BYTES: u64 = 32 << 20;
const MAX_TURNS: u64 = 1 << 48;

/// A whole session.
#[derive(Clone, Debug, PartialEq)]
pub struct PortableSession {
    pub summary: SessionSummary,
    /// By key.
    pub state: BTreeMap<String, Vec<u8>>,
    pub conversations: Vec<PortableConversation>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct PortableConversation {
    pub name: String,
    pub model: String,
    /// The digest of the model whose tokens the transcript has, if that is known.
    pub digest: Option<ModelDigest>,
    pub transcript: Transcript,
}

impl PortableSession {
    /// The rows of this session, as if its last turn had been committed at `now_ms`.
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
            return Err(invalid(format!("turns is {turns}; a session has 1 to {MAX_TURNS}")));
        }
        state::check(&self.state, limits).map_err(invalid)?;
        let mut rows: BTreeMap<String, ConversationRow> = BTreeMap::new();
        for conversation in self.conversations {
            let PortableConversation { name, model, digest, mut transcript } = conversation;
            let at = |why: String| invalid(format!("conversation {name:?}: {why}"));
            if rows.contains_key(&name) {
                return Err(at("there are two of this name".into()));
            }
            check_conversation(&name, rows.len(), transcript.messages()).map_err(at)?;
            let engine = models.get(Some(&model)).map_err(|unknown| at(unknown.to_string()))?;
            let info = engine.info();
            // Tokens of another model of that name mean nothing here; the messages do.
            match digest.is_none_or(|digest| digest == info.digest) {
                true => transcript.check(&engine).map_err(at)?,
                false => transcript.forget_tokens(),
            }
            let stored = StoredConversation { model, digest: Some(info.digest.clone()), transcript };
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
