//! `/v1/agents/{agent}/versions` and `/v1/agents/{agent}/rollback`: lists deployed versions and returns to one of
//! them.

use super::agents;
use crate::{ApiError, Gateway, access::Details, body};
use axum::{
    Extension, Json,
    extract::{Path, Request, State},
};
use serde::Deserialize;
use serde_json::{Value, json};
use skep_runtime::AgentVersion;

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Rollback {
    /// The version to activate; the default is the one before the active version.
    version: Option<u64>,
}

pub(crate) async fn list(
    State(gateway): State<Gateway>,
    Path(agent): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let versions = gateway.host.versions(&agent).await?;
    let versions: Vec<Value> = versions.iter().map(version_json).collect();
    Ok(Json(json!({"object": "list", "data": versions})))
}

/// Rolls an agent back. The body is optional.
pub(crate) async fn rollback(
    State(gateway): State<Gateway>,
    Path(agent): Path<String>,
    request: Request,
) -> Result<(Extension<Details>, Json<Value>), ApiError> {
    let bytes = body::read(request, &gateway).await?;
    let version = if bytes.is_empty() { None } else { body::parse::<Rollback>(&bytes)?.version };
    let summary = gateway.host.rollback(&agent, version).await?;
    Ok((Extension(agents::version_details(&summary)), Json(agents::summary_json(&summary))))
}

fn version_json(version: &AgentVersion) -> Value {
    json!({
        "object": "agent.version",
        "version": version.version,
        "in_force": version.is_in_force,
        "digest": version.digest,
        "deployed_at_ms": version.deployed_at_ms,
        "deployed_by": version.deployed_by,
        "manifest": version.manifest_toml,
    })
}
