//! Listings for people: sessions by their last turn, and a session's turns, state and timelines.

use super::{AgentHost, MAX_PAGE};
use crate::{RuntimeError, Tenant, TurnDetail, TurnTimeline, dispatch::session_not_found};
use skep_store::{ListedSession, SessionSearch};

/// Maximum size of one page of a session's state. A page has at least one value.
const MAX_STATE_BYTES: usize = 4 << 20;

/// A page of a session's state.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StatePage {
    pub values: Vec<(String, Vec<u8>)>,
    pub has_more: bool,
}

impl AgentHost {
    /// Returns the host's time.
    pub fn now_ms(&self) -> u64 {
        self.host().clock.now_ms()
    }

    /// Returns the sessions of a tenant, or of all tenants, beginning with the one whose last turn is the newest.
    pub async fn recent_sessions(
        &self,
        tenant: Option<&Tenant>,
        search: SessionSearch,
        limit: u32,
    ) -> Result<Vec<ListedSession>, RuntimeError> {
        let search = SessionSearch { folder: tenant.map(Tenant::folder), ..search };
        Ok(self.host().store.recent_sessions(&search, limit.min(MAX_PAGE)).await?)
    }

    /// Returns the stored turns of a session, the newest first, those before the turn with the id `before`.
    pub async fn turns(
        &self,
        agent: &str,
        session: &str,
        before: Option<&str>,
        limit: u32,
    ) -> Result<Vec<TurnDetail>, RuntimeError> {
        self.inner.dispatch.turns(agent, session, before, limit.min(MAX_PAGE)).await
    }

    /// Returns a turn and its timeline. The timeline of an ended turn is kept as long as the turn.
    pub async fn turn_timeline(
        &self,
        agent: &str,
        session: &str,
        turn: &str,
    ) -> Result<(TurnDetail, TurnTimeline), RuntimeError> {
        self.inner.dispatch.timeline(agent, session, turn).await
    }

    /// Returns values of a session's state, those after the key `after`.
    pub async fn session_state(
        &self,
        agent: &str,
        session: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<StatePage, RuntimeError> {
        self.host().deployments.known(agent)?;
        let store = &self.host().store;
        let limit = limit.min(MAX_PAGE);
        let mut values = store.session_state(agent, session, after, limit).await?;
        if values.is_empty() && store.session_bytes(agent, session).await?.is_none() {
            return Err(session_not_found(agent, session));
        }
        let mut bytes = 0;
        let fitting = values.iter().take_while(|(key, value)| {
            let is_first = bytes == 0;
            bytes += key.len() + value.len();
            is_first || bytes <= MAX_STATE_BYTES
        });
        let (fitting, found) = (fitting.count(), values.len());
        values.truncate(fitting);
        Ok(StatePage { values, has_more: fitting < found || found as u32 == limit })
    }
}
