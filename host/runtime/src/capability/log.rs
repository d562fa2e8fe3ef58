//! `skep:agent/log`: log lines of a turn, for the host's own log and for `skep logs`.
//!
//! A turn writes a bounded number of lines of bounded length. Dropped lines are counted, and the last line states the count.

use crate::{
    Clock,
    bindings::log::{Host, Level},
    capability::TurnContext,
    for_terminal,
    limits::{Counted, TurnUse},
    text::cut,
};
use skep_store::LogEntry;
use std::sync::Arc;

pub(crate) const MAX_LINES: usize = 200;
pub(crate) const MAX_LINE_BYTES: usize = 4 << 10;

/// The log lines of one turn, or of a description (then `session` is empty and `turn` is 0).
#[derive(Debug, Default)]
pub(crate) struct TurnLog {
    clock: Clock,
    agent: String,
    session: String,
    turn: u64,
    lines: Vec<LogEntry>,
    bytes_left: usize,
    limit_kb: u32,
    dropped: u64,
    used: Arc<TurnUse>,
}

impl Host for TurnContext {
    fn write(&mut self, level: Level, message: String) -> wasmtime::Result<()> {
        self.charge(message.len())?;
        let is_kept = self.log.write(level, &message);
        // A turn that runs again repeats what its client has received before.
        if let Some(turn) = self.turn.as_ref().filter(|turn| is_kept && !turn.journal.is_replaying())
            && let Some(client) = turn.client()
        {
            client.log(level_name(level), cut(&message, MAX_LINE_BYTES));
        }
        Ok(())
    }
}

impl TurnLog {
    pub(crate) fn new(clock: &Clock, agent: &str, session: &str, turn: u64) -> Self {
        let (clock, agent, session) = (clock.clone(), agent.to_owned(), session.to_owned());
        TurnLog { clock, agent, session, turn, ..TurnLog::default() }
    }

    /// Limits the total text to `limit_kb` KiB, which count as `used`.
    pub(crate) fn within(self, limit_kb: u32, used: Arc<TurnUse>) -> Self {
        TurnLog { bytes_left: limit_kb as usize * 1024, limit_kb, used, ..self }
    }

    /// Writes a line. Returns whether it was kept.
    pub(crate) fn write(&mut self, level: Level, message: &str) -> bool {
        let message = cut(message, MAX_LINE_BYTES);
        if self.lines.len() >= MAX_LINES || message.len() > self.bytes_left {
            self.dropped += 1;
            return false;
        }
        self.bytes_left -= message.len();
        self.used.add(Counted::LogBytes, message.len() as u64);
        let (agent, session, turn) = (&*self.agent, &*self.session, self.turn);
        // Only the shown line is sanitized; the stored line is not changed.
        let shown = for_terminal(message);
        match level {
            Level::Debug => tracing::debug!(target: "skep_agent", agent, session, turn, "{shown}"),
            Level::Info => tracing::info!(target: "skep_agent", agent, session, turn, "{shown}"),
            Level::Warn => tracing::warn!(target: "skep_agent", agent, session, turn, "{shown}"),
            Level::Error => tracing::error!(target: "skep_agent", agent, session, turn, "{shown}"),
        }
        self.lines.push(LogEntry {
            at_ms: self.clock.now_ms(),
            level: level_name(level).to_owned(),
            message: message.to_owned(),
        });
        true
    }

    /// Returns the last error line, which often says why the guest trapped.
    pub(crate) fn last_error(&self) -> Option<&str> {
        self.lines.iter().rev().find(|line| line.level == "error").map(|line| line.message.as_str())
    }

    /// Takes the lines, to store them.
    pub(crate) fn take(&mut self) -> Vec<LogEntry> {
        let mut lines = std::mem::take(&mut self.lines);
        if self.dropped > 0 {
            let message = format!(
                "{} more lines were dropped; a turn may write {MAX_LINES} lines with a total of {} KiB (`log_kb` under [limits])",
                self.dropped, self.limit_kb
            );
            lines.push(LogEntry { at_ms: self.clock.now_ms(), level: "warn".to_owned(), message });
            self.dropped = 0;
        }
        lines
    }
}

fn level_name(level: Level) -> &'static str {
    match level {
        Level::Debug => "debug",
        Level::Info => "info",
        Level::Warn => "warn",
        Level::Error => "error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_truncated_and_excess_lines_counted() {
        let mut log = TurnLog::new(&Clock::default(), "a", "s", 1).within(256, Arc::default());
        log.write(Level::Error, &"é".repeat(MAX_LINE_BYTES));
        for _ in 0..MAX_LINES + 4 {
            log.write(Level::Info, "again");
        }
        assert_eq!(log.last_error().map(str::len), Some(MAX_LINE_BYTES));
        let lines = log.take();
        assert_eq!(lines.len(), MAX_LINES + 1);
        assert!(lines[MAX_LINES].message.starts_with("5 more lines were dropped; a turn may write 200"));
        assert!(log.take().is_empty());
    }

    #[test]
    fn total_bytes_are_bounded_and_a_shorter_line_may_still_fit() {
        let mut log = TurnLog::new(&Clock::default(), "a", "s", 1).within(1, Arc::default());
        log.write(Level::Info, &"x".repeat(1_000));
        log.write(Level::Info, &"y".repeat(100));
        log.write(Level::Info, "last words");
        let lines = log.take();
        assert_eq!(lines.len(), 3);
        assert_eq!(lines[1].message, "last words");
        assert!(lines[2].message.contains("`log_kb`"), "{}", lines[2].message);
    }
}
