//! Sessions that accept nothing new, because a turn of theirs is held since the host was restored.

use crate::{
    RuntimeError,
    name::{SessionKey, plain_session},
};
use std::{
    collections::HashSet,
    sync::{PoisonError, RwLock},
};

/// Sessions with held turns.
#[derive(Default)]
pub(crate) struct HeldSessions(RwLock<HashSet<SessionKey>>);

impl HeldSessions {
    /// Fails if the session has a held turn and therefore accepts nothing.
    pub(crate) fn check(&self, agent: &str, session: &str) -> Result<(), RuntimeError> {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        if held.is_empty()
            || !held.contains(&SessionKey { agent: agent.to_owned(), session: session.to_owned() })
        {
            return Ok(());
        }
        let session = plain_session(session).to_owned();
        Err(RuntimeError::HeldSinceRestore { agent: agent.to_owned(), session })
    }

    pub(crate) fn set(&self, sessions: HashSet<SessionKey>) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = sessions;
    }
}
