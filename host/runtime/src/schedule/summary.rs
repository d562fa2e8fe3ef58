//! Summaries of schedules for the operator.

use super::ScheduleTiming;
use crate::{Json, RuntimeError};
use skep_store::ScheduleRow;

/// A schedule and its state.
#[derive(Clone, Debug, PartialEq)]
pub struct ScheduleSummary {
    pub id: String,
    pub agent: String,
    /// The session that the schedule wakes.
    pub session: String,
    pub name: String,
    /// Whether the schedule was set by the manifest rather than by a session.
    pub is_of_manifest: bool,
    pub timing: ScheduleTiming,
    pub data: Option<Json>,
    pub state: ScheduleState,
    pub due_at_ms: u64,
    /// Attempts made for the time that is due.
    pub attempt: u32,
    pub tries: u32,
    /// The error of the last failed attempt.
    pub last_error: Option<String>,
}

/// The state of a schedule, as an operator sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScheduleState {
    /// The schedule is not due, or waits for its next attempt.
    Waiting,
    /// The turn for the time that is due was requested.
    Running,
    /// All attempts have failed. The schedule waits until somebody runs or cancels it.
    Failed,
    /// The host was restored from a backup, and the operator has not yet decided whether to resume
    /// or drop the schedule.
    Held,
}

impl ScheduleSummary {
    pub(crate) fn of(row: ScheduleRow) -> Result<Self, RuntimeError> {
        let ScheduleRow { agent, owner, schedule, state, attempt, error, .. } = row;
        let unreadable = |what: String| RuntimeError::Internal {
            message: format!("schedule {} of agent {agent} is unreadable: {what}", schedule.id),
        };
        let timing = ScheduleTiming::decode(&schedule.timing).map_err(unreadable)?;
        let data = schedule.data.map(|data| serde_json::from_slice(&data)).transpose();
        let data = data.map_err(|error| unreadable(error.to_string()))?;
        Ok(ScheduleSummary {
            session: schedule.target,
            is_of_manifest: owner.is_none(),
            timing,
            data,
            state: match state {
                skep_store::ScheduleState::Waiting => ScheduleState::Waiting,
                skep_store::ScheduleState::Begun | skep_store::ScheduleState::Settled => {
                    ScheduleState::Running
                }
                skep_store::ScheduleState::Failed => ScheduleState::Failed,
                skep_store::ScheduleState::Held => ScheduleState::Held,
            },
            due_at_ms: schedule.due_ms,
            attempt,
            tries: schedule.tries,
            last_error: error,
            id: schedule.id,
            name: schedule.name,
            agent,
        })
    }
}
