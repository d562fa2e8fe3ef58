//! Log lines of agents.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A line that an agent logged.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct LogLine {
    /// Increases with every line, so that a reader can request what follows the last line that it saw.
    pub id: i64,
    pub agent: String,
    /// Empty, with turn 0, for lines that were logged outside a turn.
    pub session: String,
    pub turn: u64,
    pub at_ms: u64,
    pub level: LogLevel,
    pub message: String,
}

words! {
    /// Level of a log line.
    pub enum LogLevel {
        Debug = "debug",
        Info = "info",
        Warn = "warn",
        Error = "error",
    }
}
