//! `/v1/keys`: the API keys of this host.

use crate::{ApiError, Gateway, access::Details, body::JsonBody};
use axum::{
    Extension, Json,
    extract::{Path, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::{AgentName, ApiKey, NewApiKey, Role, Tenant};
use std::{num::NonZeroU32, time::Duration};

const DAY_MS: u64 = 24 * 3600 * 1000;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct CreateBody {
    tenant: Tenant,
    role: Role,
    /// The agents that the key is for; the default is all agents, and the models.
    agents: Option<Vec<AgentName>>,
    #[serde(default)]
    name: String,
    /// The lifetime of the key; by default it does not expire.
    expires_in_s: Option<u64>,
    /// A rate limit of the key; by default only the tenant's limit applies.
    requests_per_minute: Option<NonZeroU32>,
}

/// Creates a key. No other response contains the key itself.
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    JsonBody(body): JsonBody<CreateBody>,
) -> Result<(StatusCode, Extension<Details>, Json<Value>), ApiError> {
    let CreateBody { tenant, role, agents, name, expires_in_s, requests_per_minute } = body;
    let expires_in = expires_in_s.map(Duration::from_secs);
    let new = NewApiKey { tenant, role, agents, name, expires_in, requests_per_minute };
    let (key, secret) = gateway.host.keys().create(new).await?;
    let mut value = key_json(&key);
    value["key"] = json!(secret);
    let details = Details(format!("key={} tenant={} role={}", key.id, key.tenant, key.role));
    Ok((StatusCode::CREATED, Extension(details), Json(value)))
}

pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<Value>, ApiError> {
    let keys: Vec<Value> = gateway.host.keys().list().await?.iter().map(key_json).collect();
    Ok(Json(json!({"object": "list", "data": keys})))
}

pub(crate) async fn revoke(
    State(gateway): State<Gateway>,
    Path(key): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(key_json(&gateway.host.keys().revoke(&key).await?)))
}

fn key_json(key: &ApiKey) -> Value {
    json!({
        "object": "api_key",
        "id": key.id,
        "tenant": key.tenant.as_str(),
        "role": key.role.as_str(),
        "agents": key.agents,
        "name": key.name,
        "created_at_ms": key.created_at_ms,
        "expires_at_ms": key.expires_at_ms,
        "revoked_at_ms": key.revoked_at_ms,
        "requests_per_minute": key.requests_per_minute,
        // The precision is one day.
        "last_used_at_ms": key.last_used_day.map(|day| u64::from(day) * DAY_MS),
    })
}
