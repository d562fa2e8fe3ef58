//! What can be asked of sessions beside turns: what is in them, copies of them, and their end.
//!
//! Whatever is read is what was last committed. Whatever is written goes through the actor of the session that it is
//! written to, so that no turn of it runs meanwhile.

use super::{AgentHost, MAX_PAGE};
use crate::{
    MessagePage, PortableConversation, PortableSession, RuntimeError, SessionDetail, SessionId,
    SessionSummary, Tenant,
    access::{plain_session, tenant_of},
    capability::{StoredConversation, log::now_ms, total_usage},
    portable::MAX_PORTABLE_BYTES,
    session::{Answer, Command, SessionKey, decode_conversation},
};
use skep_engine::Cancel;
use skep_store::{ConversationRow, Existing, Fork, SessionRow};
use tokio::sync::oneshot;

/// Text of one page of messages; a page has at least one message.
const MAX_PAGE_BYTES: usize = 4 << 20;

impl AgentHost {
    /// A tenant's sessions in the order of their ids, those after `after`.
    pub async fn sessions(
        &self,
        tenant: &Tenant,
        agent: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<SessionSummary>, RuntimeError> {
        self.inner.services.known(agent)?;
        let after = after.map(|id| tenant.session(id)).transpose()?;
        let store = &self.inner.services.store;
        let rows = store.sessions(agent, &tenant.folder(), after.as_deref(), limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(session_summary).collect())
    }

    pub async fn session(&self, agent: &str, session: &str) -> Result<SessionDetail, RuntimeError> {
        self.inner.services.known(agent)?;
        let snapshot = self.inner.services.store.session(agent, session).await?;
        let snapshot = snapshot.ok_or_else(|| session_not_found(agent, session))?;
        let mut conversations: Vec<StoredConversation> = Vec::new();
        for row in &snapshot.conversations {
            conversations.push(readable(agent, session, row)?);
        }
        let state_bytes = snapshot.state.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum();
        Ok(SessionDetail {
            summary: session_summary(snapshot.row),
            messages: conversations.iter().flat_map(|one| one.transcript.messages().to_vec()).collect(),
            usage: total_usage(conversations.iter()),
            state_keys: snapshot.state.into_iter().map(|(key, _)| key).collect(),
            state_bytes,
        })
    }

    /// Messages of one conversation, at most `limit`, those whose number is over `after`.
    pub async fn messages(
        &self,
        agent: &str,
        session: &str,
        conversation: &str,
        after: u64,
        limit: u32,
    ) -> Result<MessagePage, RuntimeError> {
        self.inner.services.known(agent)?;
        let store = &self.inner.services.store;
        let Some(row) = store.conversation(agent, session, conversation).await? else {
            let known = store.conversation_names(agent, session).await?;
            let known = known.ok_or_else(|| session_not_found(agent, session))?;
            let (agent, session) = (agent.to_owned(), session.to_owned());
            let name = conversation.chars().take(80).collect();
            return Err(RuntimeError::ConversationNotFound { agent, session, name, known });
        };
        let stored = readable(agent, session, &row)?;
        let messages = stored.transcript.messages();
        let mut bytes = 0;
        let page =
            (1..).zip(messages).filter(|(number, _)| *number > after).take(limit.min(MAX_PAGE) as usize);
        let page = page.enumerate().take_while(|(index, (_, message))| {
            bytes += message.content.len();
            *index == 0 || bytes <= MAX_PAGE_BYTES
        });
        let page = page.map(|(_, (number, message))| (number, message.clone())).collect();
        Ok(MessagePage { total: messages.len() as u64, messages: page })
    }

    /// Begins the session `to` as a copy of what is committed of `from`: its state, its conversations and the number of its
    /// turns. What both have in common is served from the same KV pages.
    pub async fn fork_session(
        &self,
        agent: &str,
        from: &str,
        to: &str,
    ) -> Result<SessionSummary, RuntimeError> {
        if tenant_of(from) != tenant_of(to) {
            return Err(session_not_found(agent, from));
        }
        let from = from.to_owned();
        let fork = self.write(agent, to, |answer| Command::Fork { from: from.clone(), answer }).await?;
        match fork {
            Fork::Done(row) => Ok(session_summary(row)),
            Fork::SourceMissing => Err(session_not_found(agent, &from)),
            Fork::TargetExists => Err(session_exists(agent, to)),
        }
    }

    /// All of a session, to be kept or taken to another host.
    pub async fn export_session(&self, agent: &str, session: &str) -> Result<PortableSession, RuntimeError> {
        self.inner.services.known(agent)?;
        let store = &self.inner.services.store;
        let bytes = store.session_bytes(agent, session).await?;
        if let Some(bytes) = bytes.filter(|bytes| *bytes > MAX_PORTABLE_BYTES) {
            let message = format!(
                "session {agent}/{session} has {bytes} bytes; one of at most {MAX_PORTABLE_BYTES} can be exported"
            );
            return Err(RuntimeError::LimitExceeded { limit: "session_bytes", message });
        }
        let snapshot = store.session(agent, session).await?;
        let snapshot = snapshot.ok_or_else(|| session_not_found(agent, session))?;
        let (agent, tenant, session) = (agent.to_owned(), tenant_of(session), session.to_owned());
        let read = move |_: &Cancel| {
            let mut conversations = Vec::with_capacity(snapshot.conversations.len());
            for row in &snapshot.conversations {
                let StoredConversation { model, transcript } = readable(&agent, &session, row)?;
                conversations.push(PortableConversation { name: row.name.clone(), model, transcript });
            }
            Ok(PortableSession {
                summary: session_summary(snapshot.row),
                state: snapshot.state.into_iter().collect(),
                conversations,
            })
        };
        self.compute().run(tenant, read).await
    }

    /// Begins a session as what was exported, under the id that the export has. One that is there is refused, or replaced
    /// with everything that belongs to it. Nothing is written unless all of it is right.
    pub async fn import_session(
        &self,
        agent: &str,
        export: PortableSession,
        replace: bool,
    ) -> Result<SessionSummary, RuntimeError> {
        let services = &self.inner.services;
        let limits = services.agent(agent)?.limits;
        let tenant = tenant_of(&export.summary.id).to_owned();
        let tenant = tenant.as_str();
        let models = services.models.set().clone();
        let check = move |_: &Cancel| export.into_snapshot(&limits, &models, now_ms());
        // Each of its tokens is looked at.
        let snapshot = Box::new(services.compute.run(tenant, check).await?);
        let row = snapshot.row.clone();
        let existing = if replace { Existing::Replace } else { Existing::Refuse };
        match self.write(agent, &row.session, |answer| Command::Import { snapshot, existing, answer }).await?
        {
            true => Ok(session_summary(row)),
            false => Err(session_exists(agent, &row.session)),
        }
    }

    /// Removes all that is stored of a session, after the turns that wait in it.
    pub async fn delete_session(&self, agent: &str, session: &str) -> Result<(), RuntimeError> {
        match self.write(agent, session, Command::Delete).await? {
            true => Ok(()),
            false => Err(session_not_found(agent, session)),
        }
    }

    /// As a fault in the host would have it.
    #[cfg(test)]
    pub(crate) fn panic_in(&self, agent: &str, session: &str) {
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        let inner = &self.inner;
        inner.sessions.send(&inner.services, key, Command::Panic).expect("there is room");
    }

    /// Lets a session's actor change the session as a whole.
    async fn write<T>(
        &self,
        agent: &str,
        session: &str,
        command: impl FnOnce(Answer<T>) -> Command,
    ) -> Result<T, RuntimeError> {
        let services = &self.inner.services;
        services.admit()?;
        services.known(agent)?;
        SessionId::new(session)?;
        let (answer, written) = oneshot::channel();
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        self.inner.sessions.send(services, key, command(answer))?;
        written.await.map_err(|_ended| RuntimeError::Cancelled)?
    }
}

fn readable(agent: &str, session: &str, row: &ConversationRow) -> Result<StoredConversation, RuntimeError> {
    decode_conversation(&row.body).map_err(|error| RuntimeError::Internal {
        message: format!("conversation {:?} of session {agent}/{session} is unreadable: {error}", row.name),
    })
}

pub(super) fn session_not_found(agent: &str, session: &str) -> RuntimeError {
    let session = plain_session(session).chars().take(128).collect();
    RuntimeError::SessionNotFound { agent: agent.to_owned(), session }
}

fn session_exists(agent: &str, session: &str) -> RuntimeError {
    RuntimeError::SessionExists { agent: agent.to_owned(), session: plain_session(session).to_owned() }
}

fn session_summary(row: SessionRow) -> SessionSummary {
    SessionSummary {
        id: plain_session(&row.session).to_owned(),
        turns: row.turns,
        created_at_ms: row.created_at_ms,
        updated_at_ms: row.updated_at_ms,
    }
}
