//! `/v1/requests`: the log of requests to models, as pages, as a stream of new records, and as JSON Lines.

use super::{follow, page_limit};
use crate::{ApiError, Gateway, caller::Caller, headers, sse::Message};
use axum::{
    Json,
    body::{Body, Bytes},
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{TryStreamExt, stream};
use serde::Deserialize;
use skep_api::{
    ModelRequest, ModelRequestPage, RequestAgent, RequestAttempt, RequestCall, RequestCost, RequestMessage,
    RequestModel, RequestResult, RequestStatus, RequestSurface, RequestTexts, RequestTiming, RequestUsage,
    marker,
};
use skep_runtime::{
    LoggedBody, LoggedMessage, LoggedRequest, RequestFilter, RequestRange, RuntimeError, Tenant, excerpt,
};
use utoipa::IntoParams;

/// Number of records that an export reads at once.
const EXPORT_PAGE: u32 = 200;
/// Maximum length of a text to search for.
const MAX_SEARCH_BYTES: usize = 256;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Returns only requests that asked for this model, alias or route, or that this model answered.
    model: Option<String>,
    /// Returns only requests of this agent.
    agent: Option<String>,
    /// Returns only requests of this session.
    session: Option<String>,
    /// Returns only requests of this tenant. Only an admin may name another tenant than its own.
    tenant: Option<String>,
    /// Returns only requests that the API key with this id sent.
    key: Option<String>,
    /// Returns only requests that ended so: `ok`, `failed` or `cancelled`.
    status: Option<String>,
    /// Returns only requests that failed with this code.
    error: Option<String>,
    /// Returns only requests since this time.
    since_ms: Option<u64>,
    /// Returns only requests before this time.
    until_ms: Option<u64>,
    /// Returns only requests whose stored texts contain this one, in upper or lower case. It needs a key that may read
    /// bodies.
    q: Option<String>,
    /// Whether the records have their texts. It needs a key that may read bodies.
    bodies: Option<bool>,
    /// Number of records, 1 to 1000; the default is 100. An export has all of them by default.
    limit: Option<u32>,
    /// The `next` of the page before.
    cursor: Option<String>,
    /// Whether to stream records as they are stored, as with `accept: text/event-stream`.
    follow: Option<bool>,
    /// `json` (the default), or `jsonl` for all records, the oldest first.
    format: Option<String>,
}

/// Lists the log of requests to models, the newest first; or streams new records, or exports all of them.
///
/// An admin sees all tenants, and others see their own. The host logs requests only if its operator has switched that on. It
/// is a log and not the bill: when the host has more requests than it can log, some are missing.
#[utoipa::path(get, path = "/v1/requests", tag = "requests", operation_id = "list_requests",
    params(
        ListQuery,
        ("last-event-id" = Option<u64>, Header, description = "In a stream, continues after this record"),
    ),
    responses(
        (status = 200, description = "A page of records; with `follow` or `accept: text/event-stream`, events with the name \
                                      `request`, whose data is a record, without an end; with `format=jsonl`, a record on each line.",
            content((ModelRequestPage = "application/json"), (ModelRequest = "text/event-stream"),
                (String = "application/jsonl"))),
    ))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<ListQuery>,
    headers: HeaderMap,
) -> Result<Response, ApiError> {
    let with_bodies = query.bodies.unwrap_or(false);
    if with_bodies || query.q.is_some() {
        caller.must_read_bodies()?;
    }
    let is_export = match query.format.as_deref() {
        None | Some("json") => false,
        Some("jsonl") => true,
        Some(_) => return Err(ApiError::parameter("format", "a format is json or jsonl")),
    };
    let follows = query.follow.unwrap_or_else(|| headers::wants_events(&headers));
    let filter = filter(&query, &caller)?;
    let cursor = query.cursor.as_deref().map(position).transpose()?;
    if follows {
        let seen = headers::last_event_id(&headers)?.and_then(|id| i64::try_from(id).ok());
        let follower = gateway.host.requests().follow(filter, seen, with_bodies).await?;
        let records = stream::unfold(follower, async |mut follower| {
            let records = follower.next().await;
            Some((records, follower))
        });
        let event = move |request: LoggedRequest| Message {
            id: u64::try_from(request.key).ok(),
            ..Message::named("request", &described(request, &caller))
        };
        return Ok(follow::respond(&gateway, "requests", Vec::new(), records, event));
    }
    if is_export {
        let left = query.limit.map_or(u64::MAX, u64::from);
        return Ok(export(gateway, caller, filter, (cursor.unwrap_or(0), left), with_bodies));
    }
    let limit = page_limit(query.limit)?;
    let range = cursor.map_or(RequestRange::NEWEST, RequestRange::Before);
    let page = gateway.host.requests().page(&filter, range, limit, with_bodies).await?;
    let data = page.requests.into_iter().map(|request| described(request, &caller));
    Ok(Json(ModelRequestPage {
        object: marker::List,
        data: data.collect(),
        next: page.next.map(|next| key_of(next).to_string()),
    })
    .into_response())
}

/// Shows the record of a request, with its texts if the key may read them.
#[utoipa::path(get, path = "/v1/requests/{id}", tag = "requests", operation_id = "get_request",
    params(("id" = String, Path, description = "Id of the request")),
    responses(
        (status = 200, description = "The record.", body = ModelRequest),
        (status = 404, description = "`request_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<ModelRequest>, ApiError> {
    let found = gateway.host.requests().request(&id).await?;
    // A request of another tenant does not exist for the caller.
    let found = found.filter(|found| caller.is_admin() || found.tenant == caller.tenant.as_str());
    let Some(mut request) = found else {
        let id = excerpt(&id);
        let message = format!("no request {id:?} is in the log");
        return Err(ApiError::new(StatusCode::NOT_FOUND, "request_not_found", message));
    };
    if !caller.reads_bodies() {
        request.body = None;
    }
    Ok(Json(described(request, &caller)))
}

fn filter(query: &ListQuery, caller: &Caller) -> Result<RequestFilter, ApiError> {
    let tenant = match &query.tenant {
        None if caller.is_admin() => None,
        named => Some(caller.tenant(named.as_deref())?),
    };
    let session = match (&query.session, &tenant) {
        (Some(id), Some(tenant)) => Some(Tenant::session(tenant, id)?),
        (Some(id), None) => Some(caller.session(id)?),
        (None, _) => None,
    };
    if let Some(status) = &query.status
        && let RequestStatus::Other(_) = RequestStatus::from(&**status)
    {
        let message = format!("status is {status:?}; it must be ok, failed or cancelled");
        return Err(ApiError::parameter("status", message));
    }
    if query.q.as_ref().is_some_and(|text| text.is_empty() || text.len() > MAX_SEARCH_BYTES) {
        let message = format!("a text to search for must have 1 to {MAX_SEARCH_BYTES} bytes");
        return Err(ApiError::parameter("q", message));
    }
    Ok(RequestFilter {
        tenant: tenant.map(String::from),
        api_key: query.key.clone(),
        agent: query.agent.clone(),
        session,
        model: query.model.clone(),
        status: query.status.clone(),
        error: query.error.clone(),
        since_ms: query.since_ms,
        until_ms: query.until_ms,
        text: query.q.clone(),
    })
}

fn position(cursor: &str) -> Result<i64, ApiError> {
    cursor.parse().map_err(|_| ApiError::parameter("cursor", "a cursor is the `next` of the page before"))
}

fn key_of(range: RequestRange) -> i64 {
    match range {
        RequestRange::Before(key) | RequestRange::After(key) => key,
    }
}

/// Returns records as JSON Lines, from after a position on, a page at a time. The body breaks off if a page cannot be
/// read.
fn export(
    gateway: Gateway,
    caller: Caller,
    filter: RequestFilter,
    (after, left): (i64, u64),
    with_bodies: bool,
) -> Response {
    let start = Some((RequestRange::After(after), left));
    let lines = stream::try_unfold(start, move |next| {
        let (gateway, caller, filter) = (gateway.clone(), caller.clone(), filter.clone());
        async move {
            let Some((range, left)) = next.filter(|(_, left)| *left > 0) else { return Ok(None) };
            let limit = u32::try_from(left).map_or(EXPORT_PAGE, |left| left.min(EXPORT_PAGE));
            let page = gateway.host.requests().page(&filter, range, limit, with_bodies).await?;
            let left = left - page.requests.len() as u64;
            let mut lines = Vec::new();
            for request in page.requests {
                let record = described(request, &caller);
                serde_json::to_writer(&mut lines, &record).expect("strings and numbers always serialize");
                lines.push(b'\n');
            }
            Ok::<_, RuntimeError>(Some((Bytes::from(lines), page.next.map(|next| (next, left)))))
        }
    });
    let lines = lines.inspect_err(|error| tracing::warn!("an export of requests broke off: {error}"));
    let kind = [(header::CONTENT_TYPE, "application/jsonl")];
    (StatusCode::OK, kind, Body::from_stream(lines)).into_response()
}

fn described(request: LoggedRequest, caller: &Caller) -> ModelRequest {
    let LoggedRequest { details, .. } = request;
    let session = request.session.map(|session| caller.name_of(&session)).unwrap_or_default();
    ModelRequest {
        object: marker::ModelRequest,
        id: request.id,
        at_ms: request.at_ms,
        tenant: request.tenant,
        key: request.api_key,
        agent: request.agent.map(|name| RequestAgent {
            name,
            session,
            turn: details.turn.unwrap_or_default(),
        }),
        surface: RequestSurface::from(&*details.surface),
        model: RequestModel { asked: request.asked, answered: request.model },
        result: RequestResult {
            status: RequestStatus::from(&*request.status),
            error: request.error,
            finish_reason: details.finish_reason,
            streamed: details.streamed,
        },
        timing: RequestTiming {
            queue_ms: details.queue_ms,
            first_token_ms: details.first_token_ms,
            total_ms: details.total_ms,
        },
        usage: details.usage.map(|usage| RequestUsage {
            prompt_tokens: usage.prompt_tokens,
            cached_tokens: usage.cached_tokens,
            cache_write_tokens: usage.cache_write_tokens,
            completion_tokens: usage.completion_tokens,
            estimated: usage.estimated,
        }),
        cost: details.cost.map(|cost| RequestCost { amount: cost.amount, currency: cost.currency }),
        attempts: details
            .attempts
            .into_iter()
            .map(|attempt| RequestAttempt {
                upstream: attempt.upstream,
                model: attempt.model,
                outcome: attempt.outcome,
                status: attempt.status,
                ms: attempt.ms,
            })
            .collect(),
        has_body: request.has_body,
        body: request.body.map(texts),
    }
}

fn texts(body: LoggedBody) -> RequestTexts {
    RequestTexts {
        messages: body.messages.into_iter().map(message).collect(),
        omitted_messages: body.omitted_messages,
        request_truncated: body.request_truncated,
        answer: message(body.answer),
        answer_truncated: body.answer_truncated,
        error: body.error,
    }
}

fn message(message: LoggedMessage) -> RequestMessage {
    let LoggedMessage { role, text, reasoning, name, call_id, calls } = message;
    let calls =
        calls.into_iter().map(|call| RequestCall { id: call.id, name: call.name, arguments: call.arguments });
    RequestMessage { role, text, reasoning, name, call_id, calls: calls.collect() }
}
