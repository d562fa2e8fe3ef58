//! `/v1/schedules` and `/v1/agents/{agent}/schedules/{id}`: the schedules of agents.

use super::page_limit;
use crate::{ApiError, Gateway};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use serde::Deserialize;
use skep_api::{Schedule, SchedulePage, ScheduleState, ScheduleTiming, marker};
use skep_runtime::{Json as RawJson, ScheduleSummary};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Lists only the schedules of this agent.
    agent: Option<String>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Lists schedules: the next due ones first, those that failed permanently last.
#[utoipa::path(get, path = "/v1/schedules", tag = "schedules", operation_id = "list_schedules", params(ListQuery), responses(
    (status = 200, description = "A page of schedules.", body = SchedulePage),
    (status = 404, description = "`agent_not_found`"),
))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    Query(query): Query<ListQuery>,
) -> Result<Json<SchedulePage<RawJson>>, ApiError> {
    let limit = page_limit(query.limit)?;
    let schedules = gateway.host.schedules(query.agent.as_deref(), limit).await?;
    let has_more = schedules.len() as u32 == limit;
    Ok(Json(SchedulePage::new(schedules.into_iter().map(described), has_more)))
}

/// Makes a schedule due immediately.
#[utoipa::path(post, path = "/v1/agents/{agent}/schedules/{id}/run", tag = "schedules", operation_id = "run_schedule",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("id" = String, Path, description = "Id of the schedule"),
    ),
    responses(
        (status = 202, description = "The schedule is due now."),
        (status = 404, description = "`agent_not_found` or `schedule_not_found`"),
    ))]
pub(crate) async fn run(
    State(gateway): State<Gateway>,
    Path((agent, id)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    gateway.host.run_schedule(&agent, &id).await?;
    Ok(StatusCode::ACCEPTED)
}

/// Cancels a schedule. One from the manifest comes back with the next deployment.
#[utoipa::path(delete, path = "/v1/agents/{agent}/schedules/{id}", tag = "schedules", operation_id = "cancel_schedule",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("id" = String, Path, description = "Id of the schedule"),
    ),
    responses(
        (status = 204, description = "The schedule is cancelled."),
        (status = 404, description = "`agent_not_found` or `schedule_not_found`"),
    ))]
pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    Path((agent, id)): Path<(String, String)>,
) -> Result<StatusCode, ApiError> {
    gateway.host.cancel_schedule(&agent, &id).await?;
    Ok(StatusCode::NO_CONTENT)
}

fn described(schedule: ScheduleSummary) -> Schedule<RawJson> {
    Schedule {
        object: marker::Schedule,
        id: schedule.id,
        agent: schedule.agent,
        session: schedule.session,
        name: schedule.name,
        manifest: schedule.is_of_manifest,
        timing: match schedule.timing {
            skep_runtime::ScheduleTiming::At(at_ms) => ScheduleTiming::At { at_ms },
            skep_runtime::ScheduleTiming::Every(every_ms) => ScheduleTiming::Every { every_ms },
            skep_runtime::ScheduleTiming::Cron { expression, time_zone } => {
                ScheduleTiming::Cron { cron: expression, time_zone }
            }
        },
        data: schedule.data,
        state: match schedule.state {
            skep_runtime::ScheduleState::Waiting => ScheduleState::Waiting,
            skep_runtime::ScheduleState::Running => ScheduleState::Running,
            skep_runtime::ScheduleState::Failed => ScheduleState::Failed,
            skep_runtime::ScheduleState::Held => ScheduleState::Held,
        },
        due_at_ms: schedule.due_at_ms,
        attempt: schedule.attempt,
        tries: schedule.tries,
        last_error: schedule.last_error,
    }
}
