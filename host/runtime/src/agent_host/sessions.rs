//! Operations on sessions other than turns: reading, copying, exporting and deleting them.
//!
//! Reads return the last committed state. Writes go through the actor of the session that they
//! change, so that none of its turns runs meanwhile.

use super::{AgentHost, MAX_PAGE};
use crate::{
    ConversationSummary, MessagePage, PortableConversation, PortableSession, RuntimeError, SessionDetail,
    SessionId, SessionSummary, Tenant,
    capability::{StoredConversation, is_quick_conversation},
    dispatch::session_not_found,
    name::{SessionKey, plain_session, tenant_of},
    portable::MAX_PORTABLE_BYTES,
    session::{Command, Responder},
    text::excerpt,
};
use skep_engine::{Cancel, Usage, chat::ChatMessage};
use skep_store::{ConversationOutline, ConversationRow, Existing, Fork, SessionRow};
use tokio::sync::oneshot;

/// Maximum text size of one page of messages. A page has at least one message.
const MAX_PAGE_BYTES: usize = 4 << 20;

impl AgentHost {
    /// Returns a tenant's sessions ordered by id, those after the id `after`.
    pub async fn sessions(
        &self,
        tenant: &Tenant,
        agent: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<SessionSummary>, RuntimeError> {
        self.host().deployments.known(agent)?;
        let after = after.map(|id| tenant.session(id)).transpose()?;
        let store = &self.host().store;
        let rows = store.sessions(agent, &tenant.folder(), after.as_deref(), limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(session_summary).collect())
    }

    /// Returns a session as last committed, with its first messages. `session` is the host's id.
    pub async fn session(&self, agent: &str, session: &str) -> Result<SessionDetail, RuntimeError> {
        self.host().deployments.known(agent)?;
        let store = &self.host().store;
        let outline = store.session_outline(agent, session).await?;
        let outline = outline.ok_or_else(|| session_not_found(agent, session))?;
        let (mut conversations, mut usage) =
            (Vec::with_capacity(outline.conversations.len()), Usage::default());
        let (mut page, mut has_more) = (Page::of(MAX_PAGE), false);
        // Conversations are read one after the other, so that no two are in memory at once.
        for ConversationOutline { name, .. } in outline.conversations {
            // The conversation may have been deleted meanwhile.
            let Some(row) = store.conversation(agent, session, &name).await? else { continue };
            let bytes = row.body.len() as u64;
            let StoredConversation { model, transcript, .. } = self.read_conversation(session, row).await?;
            let messages = transcript.messages();
            has_more |= page.add(messages) < messages.len();
            usage.add(&transcript.usage());
            conversations.push(ConversationSummary { name, model, messages: messages.len() as u64, bytes });
        }
        let state_bytes = outline.state.iter().map(|(key, value)| (key.len() + value.len()) as u64).sum();
        Ok(SessionDetail {
            summary: session_summary(outline.row),
            conversations,
            messages: page.messages,
            has_more,
            usage,
            state_keys: outline.state.into_iter().map(|(key, _)| key).collect(),
            state_bytes,
        })
    }

    /// Returns up to `limit` messages of one conversation, those with a number greater than
    /// `after`.
    pub async fn messages(
        &self,
        agent: &str,
        session: &str,
        conversation: &str,
        after: u64,
        limit: u32,
    ) -> Result<MessagePage, RuntimeError> {
        self.host().deployments.known(agent)?;
        let store = &self.host().store;
        let Some(row) = store.conversation(agent, session, conversation).await? else {
            let known = store.conversation_names(agent, session).await?;
            let known = known.ok_or_else(|| session_not_found(agent, session))?;
            let (agent, session) = (agent.to_owned(), session.to_owned());
            let name = excerpt(conversation);
            return Err(RuntimeError::ConversationNotFound { agent, session, name, known });
        };
        let stored = self.read_conversation(session, row).await?;
        let messages = stored.transcript.messages();
        let skipped = usize::try_from(after).unwrap_or(usize::MAX).min(messages.len());
        let mut page = Page::of(limit.min(MAX_PAGE));
        page.add(&messages[skipped..]);
        Ok(MessagePage {
            total: messages.len() as u64,
            messages: (after.saturating_add(1)..).zip(page.messages).collect(),
            model: stored.model.clone(),
        })
    }

    /// Creates the session `to` as a copy of the committed session `from`, including state,
    /// conversations and turn number. Content that both share is served from the same KV pages.
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
        let fork = self.write(agent, to, |responder| Command::Fork { from: from.clone(), responder }).await?;
        match fork {
            Fork::Done(row) => Ok(session_summary(row)),
            Fork::SourceMissing => Err(session_not_found(agent, &from)),
            Fork::TargetExists => Err(session_exists(agent, to)),
        }
    }

    /// Exports a complete session, to keep it or move it to another host.
    pub async fn export_session(&self, agent: &str, session: &str) -> Result<PortableSession, RuntimeError> {
        self.host().deployments.known(agent)?;
        let store = &self.host().store;
        let bytes = store.session_bytes(agent, session).await?;
        if let Some(bytes) = bytes.filter(|bytes| *bytes > MAX_PORTABLE_BYTES) {
            let (agent, session) = (agent.to_owned(), plain_session(session).to_owned());
            return Err(RuntimeError::SessionTooLarge { agent, session, bytes, limit: MAX_PORTABLE_BYTES });
        }
        let snapshot = store.session(agent, session).await?;
        let snapshot = snapshot.ok_or_else(|| session_not_found(agent, session))?;
        let tenant = tenant_of(session);
        let read = move |_: &Cancel| {
            let mut conversations = Vec::with_capacity(snapshot.conversations.len());
            for row in &snapshot.conversations {
                let StoredConversation { model, digest, transcript } = StoredConversation::read(row)?;
                conversations.push(PortableConversation {
                    name: row.name.clone(),
                    model,
                    digest,
                    transcript,
                });
            }
            Ok(PortableSession {
                summary: session_summary(snapshot.row),
                state: snapshot.state.into_iter().collect(),
                conversations,
            })
        };
        self.compute().run(tenant, read).await
    }

    /// Creates a session from an export, under the exported id. An existing session is either
    /// refused or replaced with everything that belongs to it. Nothing is written unless the whole
    /// export is valid.
    pub async fn import_session(
        &self,
        agent: &str,
        export: PortableSession,
        replace: bool,
    ) -> Result<SessionSummary, RuntimeError> {
        let host = self.host();
        let limits = host.deployments.agent(agent)?.limits;
        let tenant = tenant_of(&export.summary.id).to_owned();
        let tenant = tenant.as_str();
        let models = host.reach.models.set().clone();
        let now_ms = host.clock.now_ms();
        let check = move |_: &Cancel| export.into_snapshot(&limits, &models, now_ms);
        // Runs in the compute pool because every token is checked.
        let snapshot = Box::new(host.reach.compute.run(tenant, check).await?);
        let row = snapshot.row.clone();
        let existing = if replace { Existing::Replace } else { Existing::Refuse };
        match self
            .write(agent, &row.session, |responder| Command::Import { snapshot, existing, responder })
            .await?
        {
            true => Ok(session_summary(row)),
            false => Err(session_exists(agent, &row.session)),
        }
    }

    /// Removes everything stored of a session, after the turns that are waiting in it.
    pub async fn delete_session(&self, agent: &str, session: &str) -> Result<(), RuntimeError> {
        match self.write(agent, session, Command::Delete).await? {
            true => Ok(()),
            false => Err(session_not_found(agent, session)),
        }
    }

    async fn read_conversation(
        &self,
        session: &str,
        row: ConversationRow,
    ) -> Result<StoredConversation, RuntimeError> {
        let is_quick = is_quick_conversation(row.body.len());
        let read = move |_: &Cancel| StoredConversation::read(&row);
        self.compute().run_unless(is_quick, tenant_of(session), read).await
    }

    /// Makes the session's actor panic, to simulate a bug in the host.
    #[cfg(test)]
    pub(crate) fn panic_in(&self, agent: &str, session: &str) {
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        let inner = &self.inner;
        let (sessions, owned) = (&inner.dispatch.sessions, crate::cluster::Owned::default());
        sessions.send(&inner.dispatch.host, key, Command::Panic, owned).expect("there is room");
    }

    /// Sends a command to a session's actor that changes the session as a whole. Fails if another host of the cluster owns the
    /// session: requests are sent to the owner before they get here, so the session has just moved.
    pub(super) async fn write<T>(
        &self,
        agent: &str,
        session: &str,
        command: impl FnOnce(Responder<T>) -> Command,
    ) -> Result<T, RuntimeError> {
        let host = self.host();
        host.shutdown.admit()?;
        host.deployments.known(agent)?;
        SessionId::new(session)?;
        self.inner.dispatch.admission.held.check(agent, session)?;
        let (responder, written) = oneshot::channel();
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        let owned = self.inner.dispatch.claim(&key).await?;
        self.inner.dispatch.sessions.send(host, key, command(responder), owned)?;
        written.await.map_err(|_ended| RuntimeError::Cancelled)?
    }
}

/// Collects messages until there are enough of them or enough text. The first message always fits.
struct Page {
    room: usize,
    bytes: usize,
    messages: Vec<ChatMessage>,
}

impl Page {
    fn of(limit: u32) -> Self {
        Page { room: limit as usize, bytes: 0, messages: Vec::new() }
    }

    /// Adds messages and returns how many of them fit.
    fn add(&mut self, messages: &[ChatMessage]) -> usize {
        for (index, message) in messages.iter().enumerate() {
            self.bytes += message.text_bytes();
            let is_full = self.bytes > MAX_PAGE_BYTES && !self.messages.is_empty();
            if self.room == 0 || is_full {
                self.room = 0;
                return index;
            }
            self.room -= 1;
            self.messages.push(message.clone());
        }
        messages.len()
    }
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
