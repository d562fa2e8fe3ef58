//! The records of sessions that the hosts of a cluster share: who has begun a session, and what it takes to continue it at another
//! host once its own is gone. Without a cluster there are none.
//!
//! Invariant: a session is recorded before its client knows its id, and a host serves a session that another one has begun only
//! after it has taken the record over.

// Log levels belong to the revisions with sessions.
#![allow(deprecated)]

use super::scope::PathAgent;
use crate::{ApiError, caller::Requester};
use axum::http::StatusCode;
use rmcp::{
    model::{InitializeRequestParams, LoggingLevel},
    transport::streamable_http_server::session::{SessionState, SessionStore, SessionStoreError},
};
use serde::{Deserialize, Serialize};
use skep_runtime::{AgentHost, McpSessionKey, RuntimeError, SessionPlace, TakenMcpSession};
use std::{
    collections::{BTreeSet, HashMap},
    future::ready,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

/// Maximum size of what a client says about itself when it begins a session.
const MAX_INITIALIZE_BYTES: usize = 64 << 10;
/// Maximum size of the record of a session. What would make it larger is not continued at another host.
const MAX_RECORD_BYTES: usize = 256 << 10;
/// Interval at which it is recorded that a session is in use.
const NOTE_INTERVAL: Duration = Duration::from_secs(60);

/// The records of the sessions that this host has.
pub(super) struct Records {
    host: AgentHost,
    /// Maximum time that a session without messages is kept.
    idle: Duration,
    known: Mutex<HashMap<String, Record>>,
    /// Keeps the changes of records in order, and makes requests that arrive together take a session over once.
    writing: tokio::sync::Mutex<()>,
    /// Whether this host ends, so that its sessions continue at others.
    is_closing: AtomicBool,
}

struct Record {
    /// The epoch under which this host has the session; `None` until it is recorded.
    epoch: Option<u64>,
    /// The caller that has begun the session, and the agent that it is about; `None` until it is recorded.
    owner: Option<(Requester, Option<PathAgent>)>,
    kept: Kept,
    noted_at: Instant,
}

/// The part of a session that it takes to continue it elsewhere.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    /// The parameters with which the client described itself.
    initialize: InitializeRequestParams,
    /// The least severe level of the log lines that it wants.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) level: Option<LoggingLevel>,
    /// The resources that it has subscribed to.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(super) subscriptions: BTreeSet<String>,
}

impl Records {
    pub(super) fn new(host: AgentHost, idle: Duration) -> Self {
        let (known, writing, is_closing) = Default::default();
        Records { host, idle, known, writing, is_closing }
    }

    /// Returns whether there are other hosts that may continue a session.
    pub(super) fn are_shared(&self) -> bool {
        self.host.is_clustered()
    }

    /// Leaves the records of all sessions from now on to the hosts that continue them.
    pub(super) fn close(&self) {
        self.is_closing.store(true, Ordering::Release);
    }

    /// Records a session that has begun here, before its client knows its id.
    pub(super) async fn add(
        &self,
        id: &str,
        owner: &Requester,
        agent: Option<&PathAgent>,
    ) -> Result<(), ApiError> {
        let text = {
            let mut known = self.lock();
            let Some(record) = known.get_mut(id) else { return Ok(()) };
            record.owner = Some((owner.clone(), agent.cloned()));
            encode(&record.kept)
        };
        if text.len() > MAX_INITIALIZE_BYTES {
            let message = format!(
                "the parameters of `initialize` have {} bytes, and at most {MAX_INITIALIZE_BYTES} are recorded for the other hosts",
                text.len()
            );
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
        }
        let epoch = self.host.add_mcp_session(key(id, owner, agent), text).await?;
        if let Some(record) = self.lock().get_mut(id) {
            record.epoch = epoch;
        }
        Ok(())
    }

    /// Takes over the record of a session that this host does not have, if it belongs to this caller and was begun at this path.
    /// Returns whether the session continues here. `has` tells which sessions this host has.
    pub(super) async fn take(
        &self,
        id: &str,
        owner: &Requester,
        agent: Option<&PathAgent>,
        has: impl Fn(&str) -> bool + Send,
    ) -> Result<bool, RuntimeError> {
        if !self.are_shared() {
            return Ok(false);
        }
        let _writing = self.writing.lock().await;
        let of_caller = Some((owner.clone(), agent.cloned()));
        if let Some(record) = self.lock().get(id) {
            return Ok(record.owner == of_caller);
        }
        let taken = self.host.take_mcp_session(key(id, owner, agent), self.idle + NOTE_INTERVAL).await?;
        let Some(TakenMcpSession { epoch, state }) = taken else { return Ok(false) };
        let kept: Kept = match serde_json::from_str(&state) {
            Ok(kept) => kept,
            Err(error) => {
                tracing::warn!(%error, "the record of an MCP session cannot be read; its client has to start a new session");
                return Ok(false);
            }
        };
        tracing::debug!(epoch, "a session of an MCP client continues here, because its host is gone");
        let mut known = self.lock();
        // A request that was refused afterwards may have left a record without a session.
        known.retain(|id, record| has(id) || record.noted_at.elapsed() <= self.idle + 2 * NOTE_INTERVAL);
        known.insert(
            id.to_owned(),
            Record { epoch: Some(epoch), owner: of_caller, kept, noted_at: Instant::now() },
        );
        Ok(true)
    }

    /// Returns whether another host that lives has a session, such as one that has just taken it over.
    pub(super) async fn is_elsewhere(&self, id: &str) -> Result<bool, RuntimeError> {
        Ok(matches!(self.host.place_of_mcp_session(id).await?, SessionPlace::There(_)))
    }

    /// Returns who has begun a session that was recorded, and the agent that it is about.
    pub(super) fn owner(&self, id: &str) -> Option<(Requester, Option<PathAgent>)> {
        self.lock().get(id)?.owner.clone()
    }

    /// Returns the epoch under which this host has a session; `None` without a cluster.
    pub(super) fn epoch(&self, id: &str) -> Option<u64> {
        self.lock().get(id)?.epoch
    }

    /// Returns what it takes to continue a session.
    pub(super) fn kept(&self, id: &str) -> Option<Kept> {
        self.lock().get(id).map(|record| record.kept.clone())
    }

    /// Records in the background that a session is in use, unless this was recorded a moment ago.
    pub(super) fn touch(self: &Arc<Self>, id: &str) {
        let is_due = self.lock().get_mut(id).is_some_and(|record| {
            let is_due = record.noted_at.elapsed() >= NOTE_INTERVAL;
            if is_due {
                // The requests that come while this is recorded, which may take long, do not record it, too.
                record.noted_at = Instant::now();
            }
            is_due
        });
        if is_due {
            let (records, id) = (self.clone(), id.to_owned());
            tokio::spawn(async move { records.change(&id, |_| {}).await });
        }
    }

    /// Changes what it takes to continue a session. A change that cannot be recorded is lost when the session continues elsewhere.
    pub(super) async fn change(&self, id: &str, change: impl FnOnce(&mut Kept) + Send) {
        let _writing = self.writing.lock().await;
        let (epoch, text) = {
            let mut known = self.lock();
            let Some(record) = known.get_mut(id) else { return };
            change(&mut record.kept);
            record.noted_at = Instant::now();
            let Some(epoch) = record.epoch else { return };
            (epoch, encode(&record.kept))
        };
        if text.len() > MAX_RECORD_BYTES {
            return tracing::debug!(
                "the record of an MCP session would become too large; the change is not recorded"
            );
        }
        match self.host.note_mcp_session(id, epoch, text).await {
            Ok(true) => {}
            Ok(false) => tracing::debug!("an MCP session has no record anymore"),
            Err(error) => tracing::debug!("a change of an MCP session is not recorded: {error}"),
        }
    }

    /// Removes the record of a session that has ended here. When this host ends, it stays, unless the client has ended the session.
    pub(super) async fn end(&self, id: &str) {
        if !self.is_closing.load(Ordering::Acquire) {
            self.remove(id).await;
        }
    }

    async fn remove(&self, id: &str) {
        let Some(Record { epoch, .. }) = self.lock().remove(id) else { return };
        if let Err(error) = self.host.end_mcp_session(id, epoch).await {
            tracing::debug!("the record of an MCP session that has ended stays for now: {error}");
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Record>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A future of the protocol crate's interface.
type Stored<'a, T> = Pin<Box<dyn Future<Output = Result<T, SessionStoreError>> + Send + 'a>>;

/// Gives the protocol crate what it needs to continue a session, and takes it when one begins. What the crate's interface lacks, the
/// caller and the epoch, is added by [`Records::add`] and [`Records::take`].
impl SessionStore for Records {
    fn load<'life0, 'life1, 'async_trait>(
        &'life0 self,
        session_id: &'life1 str,
    ) -> Stored<'async_trait, Option<SessionState>>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        let kept = self.kept(session_id);
        Box::pin(ready(Ok(kept.map(|kept| SessionState::new(kept.initialize)))))
    }

    fn store<'life0, 'life1, 'life2, 'async_trait>(
        &'life0 self,
        session_id: &'life1 str,
        state: &'life2 SessionState,
    ) -> Stored<'async_trait, ()>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        'life2: 'async_trait,
        Self: 'async_trait,
    {
        let initialize = state.initialize_params.clone();
        let kept = Kept { initialize, level: None, subscriptions: BTreeSet::new() };
        let record = Record { epoch: None, owner: None, kept, noted_at: Instant::now() };
        self.lock().insert(session_id.to_owned(), record);
        Box::pin(ready(Ok(())))
    }

    /// Removes the record of a session that its client has ended, which stays until then if this host ends, too.
    fn delete<'life0, 'life1, 'async_trait>(&'life0 self, session_id: &'life1 str) -> Stored<'async_trait, ()>
    where
        'life0: 'async_trait,
        'life1: 'async_trait,
        Self: 'async_trait,
    {
        Box::pin(async move {
            self.remove(session_id).await;
            Ok(())
        })
    }
}

fn key(id: &str, owner: &Requester, agent: Option<&PathAgent>) -> McpSessionKey {
    McpSessionKey {
        id: id.to_owned(),
        tenant: owner.tenant.to_string(),
        key: owner.key.clone(),
        agent: agent.map(|PathAgent(agent)| agent.clone()),
    }
}

fn encode(kept: &Kept) -> String {
    serde_json::to_string(kept).expect("strings, numbers and JSON always serialize")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_record_is_read_as_it_was_written_and_by_other_versions() {
        let initialize = json!({
            "protocolVersion": "2025-06-18",
            "capabilities": {"elicitation": {}},
            "clientInfo": {"name": "desk", "version": "1"},
        });
        let first: Kept = serde_json::from_value(json!({"initialize": initialize, "later": 1})).unwrap();
        assert_eq!((first.level, first.subscriptions.len()), (None, 0));
        let subscriptions = BTreeSet::from(["skep://agents/a/sessions/s".to_owned()]);
        let changed = Kept { level: Some(LoggingLevel::Error), subscriptions, ..first };
        let read: Kept = serde_json::from_str(&encode(&changed)).unwrap();
        assert_eq!((read.level, &read.subscriptions), (changed.level, &changed.subscriptions));
        assert_eq!(read.initialize, changed.initialize);
        assert!(read.initialize.capabilities.elicitation.is_some());
    }
}
