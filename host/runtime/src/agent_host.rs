//! The host of all agents: what the gateway and the command line talk to.
//!
//! A handle; clones are the same host, and dropping the last one ends every session. It admits and places; the work is
//! done by `component` (deploying) and `session` (turns).

mod deployments;
mod services;
mod turns;

pub(crate) use services::{Active, InstancePlace, Services};

use crate::{
    AgentDetail, AgentSummary, FailedAgent, LogLine, RouteMatch, RuntimeError, RuntimeOptions, SessionDetail,
    SessionId, SessionSummary,
    capability::{StoredConversation, total_usage},
    session::{Command, SessionKey, Sessions, decode_conversation},
};
use skep_engine::ModelSet;
use skep_store::{LogRow, SessionRow, Store};
use std::{sync::Arc, time::Duration};
use tokio::sync::oneshot;

const MAX_PAGE: u32 = 1_000;

/// The agents of one process.
#[derive(Clone)]
pub struct AgentHost {
    inner: Arc<Inner>,
}

struct Inner {
    services: Arc<Services>,
    sessions: Arc<Sessions>,
    max_agents: usize,
    /// One deployment at a time is put into force.
    deploying: tokio::sync::Mutex<()>,
}

impl AgentHost {
    /// Starts the engine for components, compiles the agents that the store holds, and goes on with the turns that were
    /// open. An agent that does not compile any more is listed by [`AgentHost::failed_agents`] and does not keep the others
    /// from starting; its turns wait until it is deployed again.
    pub async fn start(
        store: Store,
        models: ModelSet,
        options: RuntimeOptions,
    ) -> Result<Self, RuntimeError> {
        let services = Arc::new(Services::start(store, models, &options).await?);
        services.restore().await?;
        let sessions = Arc::new(Sessions::new(&options));
        let deploying = tokio::sync::Mutex::default();
        let inner = Inner { services, sessions, max_agents: options.max_agents, deploying };
        let host = AgentHost { inner: Arc::new(inner) };
        host.resume_turns(None).await?;
        Ok(host)
    }

    /// Those that are ready, by name.
    pub fn agents(&self) -> Vec<AgentSummary> {
        self.inner.services.ready().iter().map(|agent| agent.summary()).collect()
    }

    /// Stored agents that could not be started again.
    pub fn failed_agents(&self) -> Vec<FailedAgent> {
        self.inner.services.failed()
    }

    pub fn agent(&self, name: &str) -> Result<AgentDetail, RuntimeError> {
        Ok(self.inner.services.agent(name)?.detail())
    }

    /// Removes an agent with its sessions and logs. Turns that run are cancelled.
    pub async fn delete(&self, name: &str) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        let _one = self.inner.deploying.lock().await;
        if !services.remove(name) {
            return Err(services.not_found(name));
        }
        self.inner.sessions.end_agent(name).await;
        services.store.delete_agent(name).await?;
        tracing::info!(agent = name, "deleted");
        Ok(())
    }

    /// In the order of their ids, those after `after`.
    pub async fn sessions(
        &self,
        agent: &str,
        after: Option<&str>,
        limit: u32,
    ) -> Result<Vec<SessionSummary>, RuntimeError> {
        self.inner.services.known(agent)?;
        let rows = self.inner.services.store.sessions(agent, after, limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(session_summary).collect())
    }

    /// As it was last committed.
    pub async fn session(&self, agent: &str, session: &str) -> Result<SessionDetail, RuntimeError> {
        self.inner.services.known(agent)?;
        let snapshot = self.inner.services.store.session(agent, session).await?;
        let snapshot = snapshot.ok_or_else(|| session_not_found(agent, session))?;
        let mut conversations: Vec<StoredConversation> = Vec::new();
        for row in &snapshot.conversations {
            let conversation = decode_conversation(&row.body).map_err(|error| RuntimeError::Internal {
                message: format!(
                    "conversation {:?} of session {agent}/{session} is unreadable: {error}",
                    row.name
                ),
            })?;
            conversations.push(conversation);
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

    /// Removes a session with its state and conversations, after the turns that wait in it.
    pub async fn delete_session(&self, agent: &str, session: &str) -> Result<(), RuntimeError> {
        let services = &self.inner.services;
        services.known(agent)?;
        SessionId::new(session)?;
        let (answer, deleted) = oneshot::channel();
        let key = SessionKey { agent: agent.to_owned(), session: session.to_owned() };
        self.inner.sessions.send(services, key, Command::Delete(answer))?;
        match deleted.await.map_err(|_ended| RuntimeError::Cancelled)?? {
            true => Ok(()),
            false => Err(session_not_found(agent, session)),
        }
    }

    /// Lines with an id over `after_id`, oldest first; with an `after_id` of 0 or less, the newest ones.
    pub async fn logs(&self, agent: &str, after_id: i64, limit: u32) -> Result<Vec<LogLine>, RuntimeError> {
        self.inner.services.known(agent)?;
        let after = (after_id > 0).then_some(after_id);
        let rows = self.inner.services.store.logs(agent, after, limit.min(MAX_PAGE)).await?;
        Ok(rows.into_iter().map(log_line).collect())
    }

    /// The agent and the session that a request of this method and path, without the query, is for.
    pub fn match_route(&self, method: &str, path: &str) -> Option<RouteMatch> {
        self.inner.services.match_route(method, path)
    }

    pub(crate) fn services(&self) -> &Arc<Services> {
        &self.inner.services
    }

    pub fn models(&self) -> &ModelSet {
        &self.inner.services.models
    }

    /// Sessions in memory.
    pub fn loaded_sessions(&self) -> usize {
        self.inner.sessions.count()
    }

    /// Takes no more turns, waits until those that were taken have ended or `deadline` has passed, and ends the rest.
    pub async fn drain(&self, deadline: Duration) {
        let services = &self.inner.services;
        services.close();
        if tokio::time::timeout(deadline, services.quiet()).await.is_err() {
            tracing::warn!("turns still run at the end of the drain; they are cancelled");
        }
        self.inner.sessions.end_all().await;
    }
}

fn session_not_found(agent: &str, session: &str) -> RuntimeError {
    RuntimeError::SessionNotFound { agent: agent.to_owned(), session: session.to_owned() }
}

fn session_summary(row: SessionRow) -> SessionSummary {
    SessionSummary {
        id: row.session,
        turns: row.turns,
        created_at_ms: row.created_at_ms,
        updated_at_ms: row.updated_at_ms,
    }
}

fn log_line(row: LogRow) -> LogLine {
    LogLine {
        id: row.id,
        session: row.session,
        turn: row.turn,
        at_ms: row.entry.at_ms,
        level: row.entry.level,
        message: row.entry.message,
    }
}
