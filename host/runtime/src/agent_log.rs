//! The log lines of agents: written here when no commit of a turn writes them, and followed without end and without
//! duplicates.
//!
//! Lines become visible when they are durable, together with the turn that logged them. A follower
//! reads them from the store and is only woken from here, so a slow reader costs nothing and misses
//! only what the store has dropped.

use crate::{LogLine, RuntimeError, shutdown::Shutdown};
use skep_store::{LogEntry, LogFilter, LogRow, Store};
use tokio::sync::watch;

/// Maximum number of lines returned at once.
const PAGE: u32 = 200;

/// The log of all agents. Clones share the followers.
#[derive(Clone)]
pub(crate) struct AgentLog {
    store: Store,
    shutdown: Shutdown,
    grown: watch::Sender<()>,
}

/// A position in the log.
pub struct LogFollower {
    log: AgentLog,
    filter: LogFilter,
    after_id: i64,
    grown: watch::Receiver<()>,
}

impl AgentLog {
    pub(crate) fn new(store: Store, shutdown: Shutdown) -> Self {
        AgentLog { store, shutdown, grown: watch::Sender::new(()) }
    }

    /// Stores log lines of a turn that is not committed. A write error is only logged, so that it
    /// does not hide why the turn failed.
    pub(crate) async fn keep(&self, agent: &str, session: &str, turn: u64, lines: &[LogEntry]) {
        if lines.is_empty() {
            return;
        }
        match self.store.append_logs(agent, session, turn, lines).await {
            Ok(()) => self.grew(),
            Err(error) => tracing::error!(agent, session, turn, "log lines were lost: {error}"),
        }
    }

    /// Wakes the followers after lines were stored, or when there will be no more.
    pub(crate) fn grew(&self) {
        self.grown.send_replace(());
    }

    pub(crate) fn follow(&self, filter: LogFilter, after_id: i64) -> LogFollower {
        LogFollower { log: self.clone(), filter, after_id, grown: self.grown.subscribe() }
    }
}

impl LogFollower {
    /// Returns the next lines, once there are any.
    pub async fn next(&mut self) -> Result<Vec<LogLine>, RuntimeError> {
        loop {
            // Lines that are stored from here on wake the follower again.
            self.grown.borrow_and_update();
            let store = &self.log.store;
            let newest = store.newest_log_id().await?;
            let rows = store.logs(&self.filter, Some(self.after_id), PAGE).await?;
            // Lines that the filter excludes are skipped for good.
            self.after_id = match rows.last() {
                Some(last) if rows.len() == PAGE as usize => last.id,
                last => last.map_or(newest, |last| last.id.max(newest)),
            };
            if !rows.is_empty() {
                return Ok(rows.into_iter().map(log_line).collect());
            }
            self.grown.changed().await.expect("the follower holds the log, which owns the sender");
            self.log.shutdown.admit()?;
        }
    }
}

pub(crate) fn log_line(row: LogRow) -> LogLine {
    LogLine {
        id: row.id,
        agent: row.agent,
        session: row.session,
        turn: row.turn,
        at_ms: row.entry.at_ms,
        level: row.entry.level,
        message: row.entry.message,
    }
}
