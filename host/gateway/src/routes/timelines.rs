//! `/v1/agents/{agent}/sessions/{session}/turns/{turn}/timeline`: what a turn did, and when.

use super::listings::Ended;
use crate::{ApiError, Gateway, caller::Caller, openai};
use axum::{
    Json,
    extract::{Path, State},
};
use skep_api::{LimitStatus, Timeline, TimelineCall, marker};
use skep_runtime::{CallSpan, TurnDetail, TurnLimit, TurnTimeline};

/// Shows the timeline of a turn, also while it runs.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/turns/{turn}/timeline", tag = "turns",
    operation_id = "get_timeline",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        ("turn" = String, Path, description = "Id of the turn"),
    ),
    responses(
        (status = 200, description = "The timeline.", body = Timeline),
        (status = 404, description = "`agent_not_found`, `session_not_found` or `turn_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session, turn)): Path<(String, String, String)>,
) -> Result<Json<Timeline>, ApiError> {
    let (detail, timeline) = gateway.host.turn_timeline(&agent, &session, &turn).await?;
    let TurnDetail { id, accepted_at_ms, phase, .. } = detail;
    let Ended { state, turn, ended_at_ms, .. } = Ended::of(phase);
    let TurnTimeline { started_at_ms, called_us, returned_us, calls, left_out, limits, commit_us } = timeline;
    Ok(Json(Timeline {
        object: marker::Timeline,
        turn_id: id,
        session: caller.name_of(&session),
        turn,
        state: state.to_owned(),
        accepted_at_ms,
        started_at_ms,
        ended_at_ms,
        called_us,
        returned_us,
        commit_us,
        limits: limits.into_iter().map(limit_status).collect(),
        left_out,
        calls: calls.into_iter().map(described).collect(),
    }))
}

fn limit_status(TurnLimit { name, used, limit }: TurnLimit) -> LimitStatus {
    LimitStatus { name: name.into_owned(), of: None, used, limit }
}

fn described(span: CallSpan) -> TimelineCall {
    let CallSpan { call, name, began_us, took_us, repeated, label, model, generation, progress, failed } =
        span;
    TimelineCall {
        call,
        name,
        began_us,
        took_us,
        repeated,
        label,
        model,
        usage: generation.map(|generation| openai::usage(&generation.usage)),
        queue_us: generation.map(|generation| generation.queue_us).or(progress.queue_us),
        first_token_us: generation.map(|generation| generation.first_token_us).or(progress.first_token_us),
        failed,
    }
}
