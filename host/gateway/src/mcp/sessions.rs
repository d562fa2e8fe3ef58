//! The sessions of MCP clients, of which there are only so many.
//!
//! The crate's own sessions, and beside them in which order they were used: it bounds how long an idle one lives but not
//! how many there are. Every session that ends, whyever, ends through [`SessionManager::close_session`].

use crate::{access::Requester, metrics::MCP_SESSIONS};
use futures::Stream;
use rmcp::{
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::streamable_http_server::session::{
        ServerSseMessage, SessionId, SessionManager,
        local::{LocalSessionManager, LocalSessionManagerError, SessionConfig, SessionTransport},
    },
};
use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub(super) struct BoundedSessions {
    inner: LocalSessionManager,
    uses: Mutex<Uses>,
    max: usize,
}

#[derive(Default)]
struct Uses {
    sessions: HashMap<SessionId, Use>,
    clock: u64,
}

struct Use {
    /// When it was used last, by the clock.
    last: u64,
    /// Who began it; known as soon as the client can know its id.
    owner: Option<Requester>,
}

impl BoundedSessions {
    pub(super) fn new(max: usize, idle: Duration) -> Self {
        let mut config = SessionConfig::default();
        config.keep_alive = Some(idle);
        let mut inner = LocalSessionManager::default();
        inner.session_config = config;
        BoundedSessions { inner, uses: Mutex::default(), max: max.max(1) }
    }

    /// A session that was just begun is this one's.
    pub(super) fn belongs_to(&self, id: &str, owner: Requester) {
        if let Some(used) = self.uses().sessions.get_mut(id) {
            used.owner = Some(owner);
        }
    }

    /// Whether somebody may use a session: nobody but who began it. One that is not there is nobody's.
    pub(super) fn is_of(&self, id: &str, requester: &Requester) -> bool {
        self.uses().sessions.get(id).is_some_and(|used| used.owner.as_ref() == Some(requester))
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Uses {
    fn of(&mut self, id: &SessionId) {
        self.clock += 1;
        let clock = self.clock;
        if let Some(used) = self.sessions.get_mut(id) {
            used.last = clock;
        }
    }

    fn begin(&mut self, id: SessionId) {
        self.clock += 1;
        self.sessions.insert(id, Use { last: self.clock, owner: None });
        metrics::gauge!(MCP_SESSIONS).increment(1.0);
    }

    fn end(&mut self, id: &SessionId) {
        if self.sessions.remove(id).is_some() {
            metrics::gauge!(MCP_SESSIONS).decrement(1.0);
        }
    }

    /// The one unused for longest, if there is no room for another.
    fn surplus(&self, max: usize) -> Option<SessionId> {
        let oldest = self.sessions.iter().min_by_key(|(_, used)| used.last);
        oldest.filter(|_| self.sessions.len() >= max).map(|(id, _)| id.clone())
    }
}

impl SessionManager for BoundedSessions {
    type Error = LocalSessionManagerError;
    type Transport = SessionTransport;

    async fn create_session(&self) -> Result<(SessionId, SessionTransport), Self::Error> {
        loop {
            let Some(surplus) = self.uses().surplus(self.max) else { break };
            self.close_session(&surplus).await?;
        }
        let (id, transport) = self.inner.create_session().await?;
        self.uses().begin(id.clone());
        Ok((id, transport))
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        self.inner.initialize_session(id, message).await
    }

    /// Asked first for every request of a session.
    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.uses().of(id);
        self.inner.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.uses().end(id);
        self.inner.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.inner.create_stream(id, message).await
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), Self::Error> {
        self.inner.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.inner.create_standalone_stream(id).await
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        self.inner.resume(id, last_event_id).await
    }
}
