//! Bounds the number of sessions of MCP clients. To make room for another session, the tenant with the most sessions
//! loses its least recently used one, so a tenant cannot end the sessions of another tenant that has fewer.
//!
//! This wraps the protocol crate's session manager, which limits how long idle sessions live but not how many there
//! are, and records the order of use. Every session ends through [`SessionManager::close_session`], whatever the
//! reason.

use super::{
    marking::Marking,
    marks::{self, Resumption},
    missed,
    records::Records,
    scope::PathAgent,
    tickets::{Ticket, TicketKey},
};
use crate::{caller::Requester, metrics::MCP_SESSIONS};
use futures::{Stream, StreamExt, stream};
use rmcp::{
    model::{ClientJsonRpcMessage, ServerJsonRpcMessage},
    transport::streamable_http_server::session::{
        RestoreOutcome, ServerSseMessage, SessionId, SessionManager,
        local::{
            LocalSessionManager, LocalSessionManagerError, SessionConfig, SessionError, SessionTransport,
        },
    },
};
use std::{
    collections::HashMap,
    future::{Ready, ready},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

pub(super) struct BoundedSessions {
    inner: LocalSessionManager,
    uses: Mutex<Uses>,
    records: Arc<Records>,
    tickets: Arc<TicketKey>,
    max: usize,
}

#[derive(Default)]
struct Uses {
    sessions: HashMap<SessionId, Use>,
    clock: u64,
}

struct Use {
    /// The value of the clock at the last use.
    last: u64,
    /// The caller that started the session. It is set before the client can know the session's id.
    owner: Option<Requester>,
    /// The agent in the path at which the session was started.
    agent: Option<PathAgent>,
}

impl BoundedSessions {
    pub(super) fn new(max: usize, idle: Duration, records: Arc<Records>, tickets: Arc<TicketKey>) -> Self {
        let mut config = SessionConfig::default();
        config.keep_alive = Some(idle);
        let mut inner = LocalSessionManager::default();
        inner.session_config = config;
        BoundedSessions { inner, uses: Mutex::default(), records, tickets, max: max.max(1) }
    }

    /// Returns whether this host has a session.
    pub(super) fn has(&self, id: &str) -> bool {
        self.uses().sessions.contains_key(id)
    }

    /// Ends sessions until there is room for another.
    async fn make_room(&self) -> Result<(), LocalSessionManagerError> {
        loop {
            let Some(surplus) = self.uses().surplus(self.max) else { return Ok(()) };
            self.close_session(&surplus).await?;
        }
    }

    /// Sets the owner of a new session, and the agent that it is about.
    pub(super) fn belongs_to(&self, id: &str, owner: Requester, agent: Option<PathAgent>) {
        if let Some(used) = self.uses().sessions.get_mut(id) {
            used.owner = Some(owner);
            used.agent = agent;
        }
    }

    /// Returns whether `requester` may use a session at this path, which only its owner may, and only where it was started. An
    /// unknown session belongs to nobody.
    pub(super) fn is_of(&self, id: &str, requester: &Requester, agent: Option<&PathAgent>) -> bool {
        let uses = self.uses();
        let used = uses.sessions.get(id);
        used.is_some_and(|used| used.owner.as_ref() == Some(requester) && used.agent.as_ref() == agent)
    }

    /// Continues the stream of a request that this host answers, after one of its events. Fails if the request was answered
    /// meanwhile, because the protocol crate does not keep the answer.
    pub(super) async fn resume_request(
        &self,
        id: &SessionId,
        event: &str,
        ticket: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + 'static, LocalSessionManagerError> {
        self.uses().of(id);
        let epoch = self.records.epoch(id);
        let stream = self.inner.resume(id, event.to_owned()).await?.filter(after(marks::index(event)));
        Ok(stream.map(move |event| marks::mark(event, epoch, Some(&ticket))))
    }

    fn uses(&self) -> MutexGuard<'_, Uses> {
        self.uses.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Use {
    fn tenant(&self) -> Option<&str> {
        self.owner.as_ref().map(|owner| owner.tenant.as_str())
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
        self.sessions.insert(id, Use { last: self.clock, owner: None, agent: None });
        metrics::gauge!(MCP_SESSIONS).increment(1.0);
    }

    fn end(&mut self, id: &SessionId) {
        if self.sessions.remove(id).is_some() {
            metrics::gauge!(MCP_SESSIONS).decrement(1.0);
        }
    }

    /// Returns the session to end if there is no room for another.
    fn surplus(&self, max: usize) -> Option<SessionId> {
        if self.sessions.len() < max {
            return None;
        }
        let mut of_tenants: HashMap<Option<&str>, usize> = HashMap::new();
        for used in self.sessions.values() {
            *of_tenants.entry(used.tenant()).or_default() += 1;
        }
        let most = of_tenants.values().copied().max()?;
        let may_end = |used: &&Use| of_tenants.get(&used.tenant()) == Some(&most);
        let oldest = self.sessions.iter().filter(|(_, used)| may_end(used)).min_by_key(|(_, used)| used.last);
        oldest.map(|(id, _)| id.clone())
    }
}

impl SessionManager for BoundedSessions {
    type Error = LocalSessionManagerError;
    type Transport = SessionTransport;

    async fn create_session(&self) -> Result<(SessionId, SessionTransport), Self::Error> {
        self.make_room().await?;
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

    /// Records a use of the session. The protocol crate calls this first for every request of a session.
    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.uses().of(id);
        self.inner.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        self.uses().end(id);
        self.records.end(id).await;
        self.inner.close_session(id).await
    }

    /// Continues a session whose record this host has taken over.
    async fn restore_session(&self, id: SessionId) -> Result<RestoreOutcome<SessionTransport>, Self::Error> {
        self.make_room().await?;
        let outcome = self.inner.restore_session(id.clone()).await?;
        if matches!(outcome, RestoreOutcome::Restored(_)) {
            self.uses().begin(id.clone());
            if let Some((owner, agent)) = self.records.owner(&id) {
                self.belongs_to(&id, owner, agent);
            }
        }
        Ok(outcome)
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        mut message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let (epoch, issued) = (self.records.epoch(id), Ticket::issue(&mut message));
        let stream = self.inner.create_stream(id, message).await?;
        Ok(Marking::new(stream, epoch, issued, self.tickets.of_session(id)).events())
    }

    /// Accepts a message without an answer. The answer to a question of another host is ignored, as any that comes too late.
    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), Self::Error> {
        match marks::answer(message, self.records.epoch(id)) {
            Some(message) => self.inner.accept_message(id, message).await,
            None => {
                tracing::debug!("a client has answered a question that another host has asked");
                Ok(())
            }
        }
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let epoch = self.records.epoch(id);
        let stream = self.inner.create_standalone_stream(id).await?;
        Ok(stream.map(move |event| marks::mark(event, epoch, None)))
    }

    /// Continues the session's own stream. At another host than before, the client hears first what may have changed meanwhile.
    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let epoch = self.records.epoch(id);
        let stream = match marks::resumption(&last_event_id, epoch) {
            Resumption::NewsHere(event) => {
                let stream = self.inner.resume(id, event.clone()).await?;
                // Without a mark, the id 0 is that of the first event, and of what a new stream begins with.
                let seen = marks::index(&event).filter(|seen| *seen > 0 || epoch.is_some());
                stream.filter(after(seen)).left_stream()
            }
            Resumption::News => {
                let missed = missed::while_away(self.records.kept(id));
                let stream = self.inner.create_standalone_stream(id).await?;
                stream::iter(missed).chain(stream).right_stream()
            }
            // Streams of requests are continued by `resumed`.
            Resumption::Here(..) | Resumption::Lost(_) | Resumption::Answered => {
                return Err(SessionError::InvalidEventId.into());
            }
        };
        Ok(stream.map(move |event| marks::mark(event, epoch, None)))
    }
}

/// Returns a filter of the events that follow the one at this position. The protocol crate repeats the last event that the client
/// has seen.
fn after(last: Option<u64>) -> impl FnMut(&ServerSseMessage) -> Ready<bool> + Send + Sync + 'static {
    move |event| {
        let index = event.event_id.as_deref().and_then(marks::index);
        ready(index.is_none() || index > last)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use skep_runtime::Tenant;

    #[test]
    fn a_tenant_with_many_sessions_cannot_end_those_of_another() {
        let mut uses = Uses::default();
        let begin = |uses: &mut Uses, tenant: &str, number: usize| {
            while let Some(surplus) = uses.surplus(10) {
                uses.end(&surplus);
            }
            let id: SessionId = format!("{tenant} {number}").into();
            uses.begin(id.clone());
            let tenant = Tenant::new(tenant).expect("a name");
            uses.sessions.get_mut(&id).expect("it has begun").owner = Some(Requester { tenant, key: None });
        };
        (0..3).for_each(|number| begin(&mut uses, "small", number));
        (0..100).for_each(|number| begin(&mut uses, "greedy", number));
        let of = |uses: &Uses, tenant: &str| {
            let mut ids: Vec<String> =
                uses.sessions.keys().filter(|id| id.starts_with(tenant)).map(|id| id.to_string()).collect();
            ids.sort();
            ids
        };
        assert_eq!(of(&uses, "small"), ["small 0", "small 1", "small 2"]);
        let newest: Vec<String> = (93..100).map(|number| format!("greedy {number}")).collect();
        assert_eq!(of(&uses, "greedy"), newest, "the oldest ones were removed");
        (3..10).for_each(|number| begin(&mut uses, "small", number));
        assert_eq!(
            (of(&uses, "small").len(), of(&uses, "greedy").len()),
            (6, 4),
            "the small tenant gets its share"
        );
    }
}
