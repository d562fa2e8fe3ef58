//! The log lines of agents: written here when no commit of a turn writes them, and followed without end and without
//! duplicates.
//!
//! Lines become visible when they are durable, together with the turn that logged them.

use crate::{
    LogLine, RuntimeError,
    follower::{Follower, LogPage, StoredLog},
    shutdown::Shutdown,
};
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

/// A reader that follows the log.
pub type LogFollower = Follower<FilteredLines>;

/// The lines of the log that a filter lets through.
pub struct FilteredLines {
    log: AgentLog,
    filter: LogFilter,
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
        let (grown, shutdown) = (self.grown.subscribe(), self.shutdown.clone());
        Follower::new(FilteredLines { log: self.clone(), filter }, after_id, grown, shutdown)
    }
}

impl StoredLog for FilteredLines {
    type Entry = LogLine;

    async fn newest(&self) -> Result<i64, RuntimeError> {
        Ok(self.log.store.newest_log_id().await?)
    }

    async fn entries_after(&self, position: i64) -> Result<LogPage<LogLine>, RuntimeError> {
        let rows = self.log.store.logs(&self.filter, Some(position), PAGE).await?;
        let last = rows.last().map(|row| row.id);
        let next = last.filter(|_| rows.len() == PAGE as usize);
        Ok(LogPage { entries: rows.into_iter().map(log_line).collect(), last, next })
    }

    fn position(line: &LogLine) -> i64 {
        line.id
    }

    fn has_several_writers(&self) -> bool {
        self.log.store.is_clustered()
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
