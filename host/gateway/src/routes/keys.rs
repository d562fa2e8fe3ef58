//! `/v1/keys`: the API keys of this host.

use crate::{
    ApiError, Gateway,
    access::Details,
    body::{JsonBody, field},
    caller::Caller,
};
use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
};
use skep_api::{Key, KeyList, NewKey, Role, marker};
use skep_runtime::{ApiKey, NewApiKey};
use std::time::Duration;

const DAY_MS: u64 = 24 * 3600 * 1000;

/// Creates a key. No other response contains the key itself.
#[utoipa::path(post, path = "/v1/keys", tag = "keys", operation_id = "create_key", request_body = NewKey, responses(
    (status = 201, description = "The key.", body = Key),
    (status = 422, description = "`invalid_key`"),
))]
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    JsonBody(body): JsonBody<NewKey>,
) -> Result<(StatusCode, Extension<Details>, Json<Key>), ApiError> {
    let NewKey { tenant, role, agents, name, expires_in_s, requests_per_minute, bodies } = body;
    if bodies {
        caller.must_read_bodies()?;
    }
    let new = NewApiKey {
        tenant: field("tenant", tenant)?,
        role: field("role", role.as_str())?,
        agents: agents.map(|agents| field("agents", agents)).transpose()?,
        name,
        expires_in: expires_in_s.map(Duration::from_secs),
        requests_per_minute,
        bodies,
    };
    let warnings = gateway.host.keys().warnings(&new).await?;
    let (key, secret) = gateway.host.keys().create(new).await?;
    let bodies = if key.bodies { " bodies" } else { "" };
    let details = Details(format!("key={} tenant={} role={}{bodies}", key.id, key.tenant, key.role));
    let created = Key { key: Some(secret), warnings, ..described(key) };
    Ok((StatusCode::CREATED, Extension(details), Json(created)))
}

/// Lists the keys, oldest first, without the keys themselves.
#[utoipa::path(get, path = "/v1/keys", tag = "keys", operation_id = "list_keys", responses(
    (status = 200, description = "All keys.", body = KeyList),
))]
pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<KeyList>, ApiError> {
    Ok(Json(KeyList::new(gateway.host.keys().list().await?.into_iter().map(described))))
}

/// Revokes a key.
#[utoipa::path(delete, path = "/v1/keys/{key}", tag = "keys", operation_id = "revoke_key",
    params(("key" = String, Path, description = "Id of the key")),
    responses(
        (status = 200, description = "The revoked key.", body = Key),
        (status = 404, description = "`key_not_found`"),
    ))]
pub(crate) async fn revoke(
    State(gateway): State<Gateway>,
    Path(key): Path<String>,
) -> Result<Json<Key>, ApiError> {
    Ok(Json(described(gateway.host.keys().revoke(&key).await?)))
}

/// Describes a key without the key itself.
pub fn described(key: ApiKey) -> Key {
    Key {
        object: marker::ApiKey,
        id: key.id,
        tenant: key.tenant.to_string(),
        role: Role::from(key.role.as_str()),
        agents: key.agents.map(|agents| agents.iter().map(ToString::to_string).collect()),
        name: key.name,
        created_at_ms: key.created_at_ms,
        expires_at_ms: key.expires_at_ms,
        revoked_at_ms: key.revoked_at_ms,
        requests_per_minute: key.requests_per_minute,
        bodies: key.bodies,
        // The precision is one day.
        last_used_at_ms: key.last_used_day.map(|day| u64::from(day) * DAY_MS),
        key: None,
        warnings: Vec::new(),
    }
}
