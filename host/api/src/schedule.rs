//! Schedules that wake sessions.

use crate::{marker, words::words};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::ToSchema;

/// A schedule and its state.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[schema(bound = "")]
pub struct Schedule<J = Value> {
    #[schema(inline)]
    pub object: marker::Schedule,
    pub id: String,
    pub agent: String,
    /// The session that the schedule wakes.
    pub session: String,
    pub name: String,
    /// Whether the manifest set the schedule, rather than a session.
    pub manifest: bool,
    pub timing: ScheduleTiming,
    #[schema(value_type = Value, required)]
    pub data: Option<J>,
    pub state: ScheduleState,
    pub due_at_ms: u64,
    /// Attempts made for the time that is due.
    pub attempt: u32,
    /// Number of attempts until the schedule fails.
    pub tries: u32,
    /// The error of the last failed attempt.
    #[schema(required)]
    pub last_error: Option<String>,
}

/// When a schedule is due: once, at an interval, or by a cron expression.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(untagged)]
pub enum ScheduleTiming {
    At { at_ms: u64 },
    Every { every_ms: u64 },
    Cron { cron: String, time_zone: String },
}

words! {
    /// State of a schedule.
    pub enum ScheduleState {
        Waiting = "waiting",
        Running = "running",
        /// All attempts have failed. The schedule waits until somebody runs or cancels it.
        Failed = "failed",
        /// The host was restored from a backup, and nobody has decided about the schedule yet.
        Held = "held",
    }
}
