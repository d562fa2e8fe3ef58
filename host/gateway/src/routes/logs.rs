//! The logs of agents: `/v1/agents/{agent}/logs` for one, and `/v1/logs` for all; as a page, or as a stream of new
//! lines.

use super::{follow, page_limit};
use crate::{ApiError, Gateway, caller::Caller, headers, sse::Message};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::HeaderMap,
    response::{IntoResponse, Response},
};
use serde::Deserialize;
use skep_api::{LogLevel, LogLineList};
use skep_runtime::{LogFilter, LogLine};
use utoipa::IntoParams;

/// The levels, in ascending order.
const LEVELS: [&str; 4] = ["debug", "info", "warn", "error"];

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct LogQuery {
    /// Returns lines after this id; the default is the newest ones.
    after: Option<i64>,
    /// Number of lines, 1 to 1000; the default is 100.
    limit: Option<u32>,
    /// Returns only lines of this session.
    session: Option<String>,
    /// The lowest level to return: `debug`, `info`, `warn` or `error`.
    level: Option<String>,
    /// Returns only lines since this time.
    since_ms: Option<u64>,
}

/// Returns log lines of an agent, as a page or as a stream of new lines.
#[utoipa::path(get, path = "/v1/agents/{agent}/logs", tag = "logs", operation_id = "list_agent_logs",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        LogQuery,
        ("last-event-id" = Option<u64>, Header, description = "In a stream, continues after this line"),
    ),
    responses(
        (status = 200, description = "A page of lines; or with `accept: text/event-stream`, events with the name `log`, whose \
                                      data is a line, without an end.",
            content((LogLineList = "application/json"), (skep_api::LogLine = "text/event-stream"))),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn agent_logs(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
    Query(query): Query<LogQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    answer(gateway, caller, Some(agent), query, headers).await
}

/// Returns log lines of all agents, as a page or as a stream of new lines.
#[utoipa::path(get, path = "/v1/logs", tag = "logs", operation_id = "list_logs",
    params(
        LogQuery,
        ("last-event-id" = Option<u64>, Header, description = "In a stream, continues after this line"),
    ),
    responses(
        (status = 200, description = "A page of lines; or with `accept: text/event-stream`, events with the name `log`, whose \
                                      data is a line, without an end.",
            content((LogLineList = "application/json"), (skep_api::LogLine = "text/event-stream"))),
    ))]
pub(crate) async fn all_logs(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<LogQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    answer(gateway, caller, None, query, headers).await
}

/// Responds with a page, or with a stream that continues where the page would end. A client that lost the stream
/// sends `Last-Event-ID`.
async fn answer(
    gateway: Gateway,
    caller: Caller,
    agent: Option<String>,
    query: LogQuery,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let LogQuery { after, limit, session, level, since_ms } = query;
    let levels = level.map_or(Ok(Vec::new()), |level| at_least(&level))?;
    let session = session.map(|id| caller.session(&id)).transpose()?;
    // An admin sees the logs of all tenants.
    let folder = (!caller.is_admin()).then(|| caller.tenant.folder());
    let filter = LogFilter { agent, session, folder, since_ms, levels };
    let limit = page_limit(limit)?;
    if !headers::wants_events(&headers) {
        let lines = gateway.host.logs(&filter, after.filter(|id| *id > 0), limit).await?;
        let lines = LogLineList::new(lines.into_iter().map(|line| described(line, &caller)));
        return Ok(Json(lines).into_response());
    }
    let last_seen = headers::last_event_id(&headers)?.and_then(|id| i64::try_from(id).ok()).or(after);
    let page = match last_seen {
        // The follower starts at the last seen line.
        Some(_) => Vec::new(),
        None => gateway.host.logs(&filter, None, limit).await?,
    };
    let after = last_seen.or(page.last().map(|line| line.id)).unwrap_or(0);
    let follower = gateway.host.follow_logs(filter, after);
    let lines = futures::stream::unfold(follower, async |mut follower| {
        let lines = follower.next().await;
        Some((lines, follower))
    });
    let event = move |line: LogLine| Message {
        id: u64::try_from(line.id).ok(),
        ..Message::named("log", &described(line, &caller))
    };
    Ok(follow::respond(&gateway, "log lines", page, lines, event))
}

fn at_least(level: &str) -> Result<Vec<&'static str>, ApiError> {
    match LEVELS.iter().position(|known| *known == level) {
        Some(least) => Ok(LEVELS[least..].to_vec()),
        None => {
            let message = format!("level is {level:?}; it must be one of {}", LEVELS.join(", "));
            Err(ApiError::parameter("level", message))
        }
    }
}

fn described(line: LogLine, caller: &Caller) -> skep_api::LogLine {
    skep_api::LogLine {
        id: line.id,
        agent: line.agent,
        session: caller.name_of(&line.session),
        turn: line.turn,
        at_ms: line.at_ms,
        level: LogLevel::from(&*line.level),
        message: line.message,
    }
}
