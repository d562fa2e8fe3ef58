//! Listings for people: sessions of all agents by their last turn, and the turns and the state of one.

use super::page_limit;
use crate::{ApiError, Gateway, caller::Caller, openai};
use axum::{
    Json,
    extract::{Path, Query, State},
};
use serde::Deserialize;
use skep_api::{
    RecentSession, RecentSessionPage, SaidMessage, StateKind, StateValue, StateValuePage, TurnSummary,
    TurnSummaryPage, marker,
};
use skep_runtime::{
    FoundMessage, FoundSession, FoundSessions, ListedSession, SearchWords, SessionCursor, SessionSearch,
    StatePage, TurnDetail, TurnPhase,
};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct RecentQuery {
    /// Lists only sessions of this agent.
    agent: Option<String>,
    /// Lists only sessions of this tenant, which an admin may name; an admin sees those of all tenants otherwise.
    tenant: Option<String>,
    /// Lists only sessions whose id has this part.
    search: Option<String>,
    /// Lists only sessions with a message in which all of these words were said, in upper or lower case and in any order.
    /// Such a page may be short or empty and still have a next one, which is `before` its `searched_to`.
    text: Option<String>,
    /// Lists only sessions after the one with this `cursor`, or after this `searched_to`.
    before: Option<String>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Lists the sessions of all agents, beginning with the one whose last turn is the newest.
#[utoipa::path(get, path = "/v1/sessions", tag = "sessions", operation_id = "list_recent_sessions", params(RecentQuery),
    responses((status = 200, description = "A page of sessions.", body = RecentSessionPage)))]
pub(crate) async fn recent(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<RecentQuery>,
) -> Result<Json<RecentSessionPage>, ApiError> {
    let limit = page_limit(query.limit)?;
    let tenant = match (&query.tenant, caller.is_admin()) {
        (None, true) => None,
        (named, _) => Some(caller.tenant(named.as_deref())?),
    };
    let agents = match (query.agent, caller.agents()) {
        (Some(agent), _) => {
            caller.may_reach(&agent)?;
            Some(vec![agent])
        }
        (None, reached) => reached.map(|agents| agents.iter().map(ToString::to_string).collect()),
    };
    let after = query.before.as_deref().map(parse_cursor).transpose()?;
    let id_part = query.search.filter(|part| !part.is_empty());
    let search = SessionSearch { folder: None, agents, id_part, after };
    let Some(text) = query.text.filter(|text| !text.is_empty()) else {
        let sessions = gateway.host.recent_sessions(tenant.as_ref(), search, limit).await?;
        let has_more = sessions.len() as u32 == limit;
        let data = sessions.into_iter().map(|session| recent_session(session, None, &caller)).collect();
        return Ok(Json(RecentSessionPage { object: marker::List, data, has_more, searched_to: None }));
    };
    let words = SearchWords::new(&text)
        .map_err(|problem| ApiError::parameter("text", format!("text cannot be searched for: {problem}")))?;
    let found = gateway.host.search_sessions(tenant.as_ref(), search, words, limit).await?;
    let FoundSessions { sessions, searched_to } = found;
    let data = sessions.into_iter();
    let data = data.map(|FoundSession { session, message }| recent_session(session, Some(message), &caller));
    Ok(Json(RecentSessionPage {
        object: marker::List,
        data: data.collect(),
        has_more: searched_to.is_some(),
        searched_to: searched_to.map(cursor),
    }))
}

fn recent_session(session: ListedSession, said: Option<FoundMessage>, caller: &Caller) -> RecentSession {
    RecentSession {
        object: marker::Session,
        agent: session.agent,
        id: caller.name_of(&session.session),
        turns: session.turns,
        created_at_ms: session.created_at_ms,
        updated_at_ms: session.cursor.updated_at_ms,
        cursor: cursor(session.cursor),
        said: said.map(|FoundMessage { conversation, number, role, excerpt }| SaidMessage {
            conversation,
            number,
            role: role.to_owned(),
            excerpt,
        }),
    }
}

/// Writes a cursor.
fn cursor(place: SessionCursor) -> String {
    format!("{}-{}", place.updated_at_ms, place.key)
}

/// Reads a cursor.
fn parse_cursor(cursor: &str) -> Result<SessionCursor, ApiError> {
    let parts = cursor.split_once('-');
    let parsed = parts.and_then(|(updated, key)| {
        Some(SessionCursor { updated_at_ms: updated.parse().ok()?, key: key.parse().ok()? })
    });
    parsed.ok_or_else(|| {
        let problem = "before is neither the `cursor` of a session of this listing nor a `searched_to`";
        ApiError::parameter("before", problem)
    })
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct TurnsQuery {
    /// Lists only turns before the one with this id.
    before: Option<String>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Lists the turns of a session that are still stored, the newest first.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/turns", tag = "turns", operation_id = "list_turns",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        TurnsQuery,
    ),
    responses(
        (status = 200, description = "A page of turns.", body = TurnSummaryPage),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn turns(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<TurnsQuery>,
) -> Result<Json<TurnSummaryPage>, ApiError> {
    let limit = page_limit(query.limit)?;
    let turns = gateway.host.turns(&agent, &session, query.before.as_deref(), limit).await?;
    let has_more = turns.len() as u32 == limit;
    let turns = turns.into_iter().map(|TurnDetail { id, accepted_at_ms, phase, .. }| {
        let usage = match &phase {
            TurnPhase::Done { outcome, .. } => Some(openai::usage(&outcome.usage)),
            _ => None,
        };
        let Ended { state, turn, ended_at_ms, code } = Ended::of(phase);
        let (object, state) = (marker::Turn, state.to_owned());
        TurnSummary { object, turn_id: id, turn, state, accepted_at_ms, ended_at_ms, usage, code }
    });
    Ok(Json(TurnSummaryPage::new(turns, has_more)))
}

/// The phase of a turn in the words of the API, without its answer.
pub(super) struct Ended {
    pub(super) state: &'static str,
    pub(super) turn: Option<u64>,
    pub(super) ended_at_ms: Option<u64>,
    pub(super) code: Option<String>,
}

impl Ended {
    pub(super) fn of(phase: TurnPhase) -> Self {
        match phase {
            TurnPhase::Waiting => Ended { state: "waiting", turn: None, ended_at_ms: None, code: None },
            TurnPhase::Running { turn } => {
                Ended { state: "running", turn: Some(turn), ended_at_ms: None, code: None }
            }
            TurnPhase::Done { outcome, ended_at_ms } => {
                Ended { state: "done", turn: Some(outcome.turn), ended_at_ms: Some(ended_at_ms), code: None }
            }
            TurnPhase::Failed { code, ended_at_ms, .. } => {
                Ended { state: "failed", turn: None, ended_at_ms: Some(ended_at_ms), code: Some(code) }
            }
        }
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct StateQuery {
    /// Lists only values whose key comes after this one.
    after: Option<String>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Lists the values of a session's state in the order of their keys.
#[utoipa::path(get, path = "/v1/agents/{agent}/sessions/{session}/state", tag = "sessions", operation_id = "list_state",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        StateQuery,
    ),
    responses(
        (status = 200, description = "A page of values.", body = StateValuePage),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
    ))]
pub(crate) async fn state(
    State(gateway): State<Gateway>,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<StateQuery>,
) -> Result<Json<StateValuePage>, ApiError> {
    let limit = page_limit(query.limit)?;
    let page = gateway.host.session_state(&agent, &session, query.after.as_deref(), limit).await?;
    let StatePage { values, has_more } = page;
    Ok(Json(StateValuePage::new(values.into_iter().map(state_value), has_more)))
}

fn state_value((key, bytes): (String, Vec<u8>)) -> StateValue {
    let size = bytes.len() as u64;
    let (kind, value, text) = match serde_json::from_slice(&bytes) {
        Ok(value) => (StateKind::Json, Some(value), None),
        Err(_) => match String::from_utf8(bytes) {
            Ok(text) => (StateKind::Text, None, Some(text)),
            Err(_) => (StateKind::Binary, None, None),
        },
    };
    StateValue { key, bytes: size, kind, value, text }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_value_is_json_or_text_or_bytes() {
        let read = |bytes: &[u8]| state_value(("k".to_owned(), bytes.to_vec()));
        assert_eq!(read(b"{\"a\": 1}").value, Some(json!({"a": 1})));
        assert_eq!(read(b"hello").text.as_deref(), Some("hello"));
        let bytes = read(&[0xff, 0xfe]);
        assert!(bytes.value.is_none() && bytes.text.is_none() && bytes.bytes == 2);
        // Both have no value in JSON; their kinds distinguish them.
        let kinds = [&b"null"[..], &[0xff, 0, 0, 0xfe], b"nul"].map(|bytes| read(bytes).kind);
        assert_eq!(kinds, [StateKind::Json, StateKind::Binary, StateKind::Text]);
        assert_eq!(serde_json::to_value(read(b"null")).unwrap()["kind"], "json");
    }

    #[test]
    fn a_cursor_that_is_not_one_is_refused() {
        assert_eq!(parse_cursor("12-7").unwrap(), SessionCursor { updated_at_ms: 12, key: 7 });
        for cursor in ["", "12", "a-b", "-1"] {
            assert_eq!(parse_cursor(cursor).unwrap_err().param.as_deref(), Some("before"), "{cursor}");
        }
    }
}
