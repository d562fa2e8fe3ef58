//! `/v1/agents/{agent}/sessions/{session}/turns/{turn}`: the status of a turn and its events, for clients that did
//! not wait or that lost their stream.

use super::messages::{TurnJson, numbered_events};
use crate::{ApiError, Gateway, caller::Caller, headers, openai, spent::Spent, sse};
use axum::{
    Json,
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use skep_api::{AcceptedTurn, TotalTime, TurnError, TurnState, TurnStatus, marker};
use skep_runtime::{Json as RawJson, Outcome, TurnDetail, TurnMessage, TurnPhase, plain_session};

type TurnPath = Path<(String, String, String)>;

/// Returns the response to a message whose turn continues on its own.
pub(super) fn accepted(agent: &str, session: &str, turn_id: &str) -> Response {
    let path = format!("/v1/agents/{agent}/sessions/{session}/turns/{turn_id}");
    let body = AcceptedTurn {
        object: marker::Turn,
        turn_id: turn_id.to_owned(),
        session: session.to_owned(),
        state: marker::Accepted,
        url: path.clone(),
        events_url: format!("{path}/events"),
    };
    let mut response = (StatusCode::ACCEPTED, Json(body)).into_response();
    let headers = response.headers_mut();
    headers.insert(HeaderName::from_static("preference-applied"), HeaderValue::from_static("respond-async"));
    // Names of agents and sessions are plain ASCII.
    if let Ok(path) = HeaderValue::from_str(&path) {
        headers.insert(header::LOCATION, path);
    }
    response
}

/// Shows the state of a turn, and its answer once it has ended.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/turns/{turn}", tag = "turns", operation_id = "get_turn",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        ("turn" = String, Path, description = "Id of the turn"),
    ),
    responses(
        (status = 200, description = "The turn.", body = TurnStatus),
        (status = 404, description = "`agent_not_found`, `session_not_found` or `turn_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session, turn)): TurnPath,
) -> Result<Json<TurnStatus<RawJson>>, ApiError> {
    let detail = gateway.host.turn(&agent, &session, &turn).await?;
    Ok(Json(described(detail, caller.name_of(&session))))
}

/// Streams the turn's events, starting after `Last-Event-ID` if it is sent, until the turn has ended.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/turns/{turn}/events", tag = "turns",
    operation_id = "follow_turn",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        ("turn" = String, Path, description = "Id of the turn"),
        ("last-event-id" = Option<u64>, Header, description = "Continues after this event"),
    ),
    responses(
        (status = 200, description = "The events of the turn, each with an id.",
            body = skep_api::TurnEvent, content_type = "text/event-stream"),
        (status = 204, description = "The turn has ended, and the client has seen its last event."),
        (status = 404, description = "`agent_not_found`, `session_not_found` or `turn_not_found`"),
    ))]
pub(crate) async fn events(
    State(gateway): State<Gateway>,
    Path((agent, session, turn)): TurnPath,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let last_id = headers::last_event_id(&headers)?;
    // The run is followed from the beginning, because the whole response at the end includes all events; the client
    // gets only those that it has not seen.
    let run = gateway.host.follow(&agent, &session, &turn).await?;
    // An EventSource would reconnect forever, unless it gets 204.
    if last_id.is_some_and(|seen| run.has_ended_by(seen)) {
        return Ok(StatusCode::NO_CONTENT.into_response());
    }
    // The request that started the turn has counted its tokens.
    let spent = Spent::default();
    let writer =
        TurnJson::new(plain_session(&session).to_owned(), run.turn_id().to_owned(), spent).after(last_id);
    Ok(sse::respond(numbered_events(run).boxed(), writer))
}

/// Cancels a turn. A turn that has ended stays as it is.
#[utoipa::path(delete, path = "/v1/agents/{agent}/sessions/{session}/turns/{turn}", tag = "turns",
    operation_id = "cancel_turn",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        ("turn" = String, Path, description = "Id of the turn"),
    ),
    responses(
        (status = 202, description = "The turn is being cancelled."),
        (status = 404, description = "`agent_not_found`, `session_not_found` or `turn_not_found`"),
    ))]
pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    Path((agent, session, turn)): TurnPath,
) -> Result<StatusCode, ApiError> {
    gateway.host.cancel_turn(&agent, &session, &turn).await?;
    Ok(StatusCode::ACCEPTED)
}

fn described(detail: TurnDetail, session: String) -> TurnStatus<RawJson> {
    let TurnDetail { id, accepted_at_ms, message, phase, .. } = detail;
    let state = match phase {
        TurnPhase::Waiting => TurnState::Waiting,
        TurnPhase::Running { turn } => TurnState::Running { turn },
        TurnPhase::Done { outcome, ended_at_ms } => {
            let Outcome { text, data, turn, usage, elapsed_us } = outcome;
            let timing = TotalTime { total_ms: elapsed_us as f64 / 1000.0 };
            TurnState::Done { turn, ended_at_ms, text, data, usage: openai::usage(&usage), timing }
        }
        TurnPhase::Failed { code, message, ended_at_ms } => {
            TurnState::Failed { ended_at_ms, error: TurnError { code, message } }
        }
    };
    let message = message.map(|TurnMessage { text, data }| skep_api::TurnMessage { text, data });
    TurnStatus { object: marker::Turn, turn_id: id, session, accepted_at_ms, message, state }
}
