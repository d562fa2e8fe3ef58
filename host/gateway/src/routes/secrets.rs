//! `/v1/secrets`: values that agents can send without seeing them. No response contains a value.

use crate::{
    ApiError, Gateway,
    access::Details,
    body::{JsonBody, field},
};
use axum::{
    Extension, Json,
    extract::{Path, Query, State},
    http::StatusCode,
};
use serde::Deserialize;
use skep_api::{NewSecret, Secret, SecretList, marker};
use skep_runtime::{Origins, SecretSummary};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub(crate) struct Owner {
    /// The agent that the secret belongs to; the default is the secret of every agent.
    agent: Option<String>,
}

/// Lists the secrets without their values.
#[utoipa::path(get, path = "/v1/secrets", tag = "secrets", operation_id = "list_secrets", responses(
    (status = 200, description = "All secrets.", body = SecretList),
))]
pub(crate) async fn list(State(gateway): State<Gateway>) -> Result<Json<SecretList>, ApiError> {
    Ok(Json(SecretList::new(gateway.host.secrets().await?.into_iter().map(described))))
}

/// Sets a secret, replacing its value if it exists.
#[utoipa::path(put, path = "/v1/secrets/{name}", tag = "secrets", operation_id = "set_secret",
    params(("name" = String, Path, description = "Name of the secret")),
    request_body = NewSecret,
    responses(
        (status = 204, description = "The secret is stored."),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn set(
    State(gateway): State<Gateway>,
    Path(name): Path<String>,
    JsonBody(secret): JsonBody<NewSecret>,
) -> Result<(StatusCode, Extension<Details>), ApiError> {
    let NewSecret { value, hosts, agent } = secret;
    let hosts: Origins = field("hosts", hosts)?;
    gateway.host.set_secret(agent.as_deref(), &name, &value, &hosts).await?;
    Ok((StatusCode::NO_CONTENT, Extension(owner_details(agent.as_deref()))))
}

/// Deletes a secret.
#[utoipa::path(delete, path = "/v1/secrets/{name}", tag = "secrets", operation_id = "delete_secret",
    params(("name" = String, Path, description = "Name of the secret"), Owner),
    responses(
        (status = 204, description = "The secret is deleted."),
        (status = 404, description = "`secret_not_found`"),
    ))]
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

fn described(secret: SecretSummary) -> Secret {
    let SecretSummary { name, agent, hosts, updated_at_ms } = secret;
    Secret { object: marker::Secret, name, agent, hosts, updated_at_ms }
}
