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
use skep_api::{CloudEvent, Event, EventPage, NewEvent, PublishedEvent, PublishedState, marker};
use skep_engine::Cancel;
use skep_runtime::{EventSummary, HOST_SOURCE, Json as RawJson, unix_ms};
use utoipa::{IntoParams, ToSchema};

/// The source of events that do not specify one.
const SOURCE: &str = "http";
const SPECIFICATION: &str = "1.0";

/// A body of `POST /v1/events`. [`Envelope`] decides which one it is.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the body")]
enum EventBody {
    Plain(NewEvent),
    Cloud(CloudEvent),
}

/// The field that distinguishes a CloudEvent from a plain event.
#[derive(Deserialize)]
struct Envelope {
    specversion: Option<String>,
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct ListQuery {
    /// Lists only events older than the one with this key.
    before: Option<i64>,
    /// Number of entries, 1 to 1000; the default is 100.
    limit: Option<u32>,
}

/// Publishes an event, as a plain object or as a CloudEvent.
///
/// A body with the field `specversion` is a CloudEvent.
#[utoipa::path(post, path = "/v1/events", tag = "events", operation_id = "publish_event", request_body = EventBody, responses(
    (status = 200, description = "The same event was published before, and nothing was done.", body = PublishedEvent),
    (status = 202, description = "The event is stored and is being delivered.", body = PublishedEvent),
))]
pub(crate) async fn publish(
    State(gateway): State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<(StatusCode, Json<PublishedEvent>), ApiError> {
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
    if event.source == HOST_SOURCE {
        let message = format!("source {HOST_SOURCE:?} is reserved for the host; choose another");
        return Err(ApiError::parameter("source", message));
    }
    let published = gateway.host.publish(event).await?;
    let body = PublishedEvent {
        object: marker::Event,
        id: published.id,
        state: if published.is_known { PublishedState::Known } else { PublishedState::Accepted },
        deliveries: published.deliveries as u64,
    };
    Ok((if published.is_known { StatusCode::OK } else { StatusCode::ACCEPTED }, Json(body)))
}

/// Lists events, newest first, and the state of their deliveries.
#[utoipa::path(get, path = "/v1/events", tag = "events", operation_id = "list_events", params(ListQuery), responses(
    (status = 200, description = "A page of events.", body = EventPage),
))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    Query(query): Query<ListQuery>,
) -> Result<Json<EventPage<RawJson>>, ApiError> {
    let limit = page_limit(query.limit)?;
    let events = gateway.host.events(query.before, limit).await?;
    let has_more = events.len() as u32 == limit;
    Ok(Json(EventPage::new(events.into_iter().map(described), has_more)))
}

fn plain(event: NewEvent<RawJson>, principal: String) -> Result<skep_runtime::Event, ApiError> {
    let NewEvent { topic, data, id, time, source } = event;
    let source = source.unwrap_or_else(|| SOURCE.to_owned());
    let at_ms = time.as_deref().map(at_ms).transpose()?;
    Ok(skep_runtime::Event { id, source, topic, data, at_ms, principal })
}

fn cloud(event: CloudEvent<RawJson>, principal: String) -> Result<skep_runtime::Event, ApiError> {
    let CloudEvent { id, source, kind, time, data, data_base64, .. } = event;
    if data_base64.is_some() {
        let message = "data_base64 is not supported; send JSON in data";
        return Err(ApiError::parameter("data_base64", message));
    }
    let at_ms = time.as_deref().map(at_ms).transpose()?;
    Ok(skep_runtime::Event { id: Some(id), source, topic: kind, data, at_ms, principal })
}

fn at_ms(time: &str) -> Result<u64, ApiError> {
    unix_ms(time).ok_or_else(|| {
        let rule = "time is not a valid RFC 3339 time since 1970, such as 2026-11-21T10:40:18Z";
        ApiError::parameter("time", rule)
    })
}

fn described(event: EventSummary) -> Event<RawJson> {
    let EventSummary { key, id, source, topic, data, at_ms, published_at_ms, pending, dead } = event;
    Event { object: marker::Event, key, id, source, topic, data, at_ms, published_at_ms, pending, dead }
}
