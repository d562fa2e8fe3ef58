//! `/v1/agents/{agent}/sessions/{session}/turns/{turn}`: the status of a turn and its events, for clients that did
//! not wait or that lost their stream.

use super::messages::{TurnJson, numbered_events};
use crate::{ApiError, Gateway, caller::Caller, headers, openai::usage_json, spent::Spent, sse};
use axum::{
    Json,
    extract::{Path, State},
    http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::StreamExt;
use serde_json::{Value, json};
use skep_runtime::{Outcome, TurnDetail, TurnPhase, plain_session};

type TurnPath = Path<(String, String, String)>;

/// Returns the response to a message whose turn continues on its own.
pub(super) fn accepted(agent: &str, session: &str, turn_id: &str) -> Response {
    let path = format!("/v1/agents/{agent}/sessions/{session}/turns/{turn_id}");
    let body = json!({
        "object": "turn",
        "turn_id": turn_id,
        "session": session,
        "state": "accepted",
        "url": path,
        "events_url": format!("{path}/events"),
    });
    let mut response = (StatusCode::ACCEPTED, Json(body)).into_response();
    let headers = response.headers_mut();
    headers.insert(HeaderName::from_static("preference-applied"), HeaderValue::from_static("respond-async"));
    // Names of agents and sessions are plain ASCII.
    if let Ok(path) = HeaderValue::from_str(&path) {
        headers.insert(header::LOCATION, path);
    }
    response
}

pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session, turn)): TurnPath,
) -> Result<Json<Value>, ApiError> {
    let mut value = detail_json(gateway.host.turn(&agent, &session, &turn).await?);
    value["session"] = json!(caller.name_of(&session));
    Ok(Json(value))
}

/// Streams the turn's events, starting after `Last-Event-ID` if it is sent, until the turn has ended.
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

pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    Path((agent, session, turn)): TurnPath,
) -> Result<StatusCode, ApiError> {
    gateway.host.cancel_turn(&agent, &session, &turn).await?;
    Ok(StatusCode::ACCEPTED)
}

fn detail_json(detail: TurnDetail) -> Value {
    let TurnDetail { id, session, accepted_at_ms, phase } = detail;
    let mut value = json!({
        "object": "turn",
        "turn_id": id,
        "session": session,
        "accepted_at_ms": accepted_at_ms,
    });
    let more = match phase {
        TurnPhase::Waiting => json!({"state": "waiting"}),
        TurnPhase::Running { turn } => json!({"state": "running", "turn": turn}),
        TurnPhase::Done { outcome, ended_at_ms } => {
            let Outcome { text, data, turn, usage, elapsed_us } = outcome;
            json!({
                "state": "done",
                "turn": turn,
                "ended_at_ms": ended_at_ms,
                "text": text,
                "data": data,
                "usage": usage_json(&usage),
                "timing": {"total_ms": elapsed_us as f64 / 1000.0},
            })
        }
        TurnPhase::Failed { code, message, ended_at_ms } => json!({
            "state": "failed",
            "ended_at_ms": ended_at_ms,
            "error": {"code": code, "message": message},
        }),
    };
    if let (Value::Object(value), Value::Object(more)) = (&mut value, more) {
        value.extend(more);
    }
    value
}
