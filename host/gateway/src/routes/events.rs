//! `/v1/events`: publishes and lists events, as plain objects or as CloudEvents in structured JSON.

use super::page_limit;
use crate::{
    ApiError, Gateway,
    body::{self, run_on_compute},
    caller::Caller,
};
use axum::{
    Json,
    extract::{Query, Request, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_engine::Cancel;
use skep_runtime::{Event, EventSummary, unix_ms};

/// The source of events that do not specify one.
const SOURCE: &str = "http";
const SPECIFICATION: &str = "1.0";

/// The field that distinguishes a CloudEvent from a plain event.
#[derive(Deserialize)]
struct Envelope {
    specversion: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct PlainEvent {
    topic: String,
    data: Option<skep_runtime::Json>,
    /// The event's unique id. Publishing it again refers to the same event.
    id: Option<String>,
    /// A time in RFC 3339.
    time: Option<String>,
    source: Option<String>,
}

/// A CloudEvent. Extensions are allowed and ignored.
#[derive(Deserialize)]
struct CloudEvent {
    id: String,
    source: String,
    #[serde(rename = "type")]
    kind: String,
    time: Option<String>,
    data: Option<skep_runtime::Json>,
    data_base64: Option<String>,
}

#[derive(Deserialize)]
pub(crate) struct ListQuery {
    /// Lists only events older than the one with this key.
    before: Option<i64>,
    limit: Option<u32>,
}

pub(crate) async fn publish(
    State(gateway): State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<(StatusCode, Json<Value>), ApiError> {
    let principal = caller.tenant.to_string();
    let bytes = body::read(request, &gateway).await?;
    let size = bytes.len();
    let read = move |_: &Cancel| match body::parse::<Envelope>(&bytes)?.specversion {
        None => plain(body::parse(&bytes)?, principal),
        Some(version) if version == SPECIFICATION => cloud(body::parse(&bytes)?, principal),
        Some(version) => {
            let message =
                format!("specversion is {version:?}; only CloudEvents {SPECIFICATION} is supported");
            Err(ApiError::parameter("specversion", message))
        }
    };
    let mut event = run_on_compute(&gateway, caller.tenant.as_str(), size, read).await?;
    // Ids are unique within a source, and a tenant must not be able to use up those of another one.
    if !caller.tenant.is_local() {
        event.source = format!("{}/{}", caller.tenant, event.source);
    }
    let published = gateway.host.publish(event).await?;
    let body = json!({
        "object": "event",
        "id": published.id,
        "state": if published.is_known { "known" } else { "accepted" },
        "deliveries": published.deliveries,
    });
    Ok((if published.is_known { StatusCode::OK } else { StatusCode::ACCEPTED }, Json(body)))
}

pub(crate) async fn list(
    State(gateway): State<Gateway>,
    Query(query): Query<ListQuery>,
) -> Result<Json<Value>, ApiError> {
    let limit = page_limit(query.limit)?;
    let events = gateway.host.events(query.before, limit).await?;
    let has_more = events.len() as u32 == limit;
    let events: Vec<Value> = events.iter().map(event_json).collect();
    Ok(Json(json!({"object": "list", "data": events, "has_more": has_more})))
}

fn plain(event: PlainEvent, principal: String) -> Result<Event, ApiError> {
    let PlainEvent { topic, data, id, time, source } = event;
    let source = source.unwrap_or_else(|| SOURCE.to_owned());
    Ok(Event { id, source, topic, data, at_ms: time.as_deref().map(at_ms).transpose()?, principal })
}

fn cloud(event: CloudEvent, principal: String) -> Result<Event, ApiError> {
    let CloudEvent { id, source, kind, time, data, data_base64 } = event;
    if data_base64.is_some() {
        let message = "data_base64 is not supported; send JSON in data";
        return Err(ApiError::parameter("data_base64", message));
    }
    let at_ms = time.as_deref().map(at_ms).transpose()?;
    Ok(Event { id: Some(id), source, topic: kind, data, at_ms, principal })
}

fn at_ms(time: &str) -> Result<u64, ApiError> {
    unix_ms(time).ok_or_else(|| {
        let rule = "time is not a valid RFC 3339 time since 1970, such as 2026-11-21T10:40:18Z";
        ApiError::parameter("time", rule)
    })
}

fn event_json(event: &EventSummary) -> Value {
    json!({
        "object": "event",
        "key": event.key,
        "id": event.id,
        "source": event.source,
        "topic": event.topic,
        "data": event.data,
        "at_ms": event.at_ms,
        "published_at_ms": event.published_at_ms,
        "pending": event.pending,
        "dead": event.dead,
    })
}
