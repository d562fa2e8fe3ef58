//! `/v1/schedules` and `/v1/agents/{agent}/schedules/{id}`: the schedules of agents.

use super::page_limit;
use crate::{ApiError, Gateway};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::{ScheduleState, ScheduleSummary, ScheduleTiming};

#[derive(Deserialize)]
pub(crate) struct ListQuery {
    /// Lists only the schedules of this agent.
    agent: Option<String>,
    limit: Option<u32>,
}

pub(crate) async fn list(
    State(gateway): State<Gateway>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Value>, ApiError> {
    let limit = page_limit(query.limit)?;
    let schedules = gateway.host.schedules(query.agent.as_deref(), limit).await?;
    let has_more = schedules.len() as u32 == limit;
    let schedules: Vec<Value> = schedules.iter().map(schedule_json).collect();
    Ok(Json(json!({"object": "list", "data": schedules, "has_more": has_more})))
}

/// Makes a schedule due immediately.
pub(crate) async fn run(
    State(gateway): State<Gateway>,
    Path((agent, id)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    gateway.host.run_schedule(&agent, &id).await?;
    Ok(StatusCode::ACCEPTED)
}

pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    Path((agent, id)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    gateway.host.cancel_schedule(&agent, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn schedule_json(schedule: &ScheduleSummary) -> Value {
    let timing = match &schedule.timing {
        ScheduleTiming::At(at_ms) => json!({"at_ms": at_ms}),
        ScheduleTiming::Every(interval_ms) => json!({"every_ms": interval_ms}),
        ScheduleTiming::Cron { expression, time_zone } => {
            json!({"cron": expression, "time_zone": time_zone})
        }
    };
    json!({
        "object": "schedule",
        "id": schedule.id,
        "agent": schedule.agent,
        "session": schedule.session,
        "name": schedule.name,
        "manifest": schedule.is_of_manifest,
        "timing": timing,
        "data": schedule.data,
        "state": match schedule.state {
            ScheduleState::Waiting => "waiting",
            ScheduleState::Running => "running",
            ScheduleState::Failed => "failed",
            ScheduleState::Held => "held",
        },
        "due_at_ms": schedule.due_at_ms,
        "attempt": schedule.attempt,
        "tries": schedule.tries,
        "last_error": schedule.last_error,
    })
}
