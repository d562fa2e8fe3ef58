//! `/v1/secrets`: values that agents can send without seeing them. No response contains a value.

use crate::{ApiError, Gateway, access::Details, body::JsonBody};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::{Origins, SecretSummary};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewSecret {
    value: String,
    /// Origins that the value may be sent to.
    hosts: Origins,
    /// The agent that may use the secret; the default is every agent that is granted it.
    agent: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Owner {
    agent: Option<String>,
}

pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<Value>, ApiError> {
    let secrets: Vec<Value> = gateway.host.secrets().await?.iter().map(secret_json).collect();
    Ok(Json(json!({"object": "list", "data": secrets})))
}

pub(crate) async fn set(
    State(gateway): State<Gateway>,
    Path(name): Path<String>,
    JsonBody(secret): JsonBody<NewSecret>,
) -> Result<(StatusCode, Extension<Details>), ApiError> {
    let NewSecret { value, hosts, agent } = secret;
    gateway.host.set_secret(agent.as_deref(), &name, &value, &hosts).await?;
    Ok((StatusCode::NO_CONTENT, Extension(owner_details(agent.as_deref()))))
}

pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    Path(name): Path<String>,
    Query(owner): Query<Owner>,
) -> Result<(StatusCode, Extension<Details>), ApiError> {
    gateway.host.delete_secret(owner.agent.as_deref(), &name).await?;
    Ok((StatusCode::NO_CONTENT, Extension(owner_details(owner.agent.as_deref()))))
}

fn owner_details(agent: Option<&str>) -> Details {
    Details(agent.map_or_else(|| "for every agent".to_owned(), |agent| format!("agent={agent}")))
}

fn secret_json(secret: &SecretSummary) -> Value {
    json!({
        "object": "secret",
        "name": secret.name,
        "agent": secret.agent,
        "hosts": secret.hosts,
        "updated_at_ms": secret.updated_at_ms,
    })
}
