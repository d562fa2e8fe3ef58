//! `/v1/agents/{agent}/versions` and `/v1/agents/{agent}/rollback`: lists deployed versions and returns to one of
//! them.

use super::agents;
use crate::{ApiError, Gateway, access::Details, body};
use axum::{
    Extension, Json,
    extract::{Path, Request, State},
};
use skep_api::{Agent, AgentVersion, Rollback, VersionList, marker};

/// Lists the stored versions of an agent, newest first.
#[utoipa::path(get, path = "/v1/agents/{agent}/versions", tag = "agents", operation_id = "list_versions",
    params(("agent" = String, Path, description = "Name of the agent")),
    responses(
        (status = 200, description = "The versions.", body = VersionList),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn list(
    State(gateway): State<Gateway>,
    Path(agent): Path<String>,
) -> Result<Json<VersionList>, ApiError> {
    Ok(Json(VersionList::new(gateway.host.versions(&agent).await?.into_iter().map(described))))
}

/// Activates an earlier version of an agent. The body is optional.
#[utoipa::path(post, path = "/v1/agents/{agent}/rollback", tag = "agents", operation_id = "rollback_agent",
    params(("agent" = String, Path, description = "Name of the agent")),
    request_body = Option<Rollback>,
    responses(
        (status = 200, description = "The agent with its active version.", body = Agent),
        (status = 404, description = "`agent_not_found` or `version_not_found`"),
        (status = 409, description = "A route of the version is taken: `invalid_route`."),
    ))]
pub(crate) async fn rollback(
    State(gateway): State<Gateway>,
    Path(agent): Path<String>,
    request: Request,
) -> Result<(Extension<Details>, Json<Agent>), ApiError> {
    let bytes = body::read(request, &gateway).await?;
    let version = if bytes.is_empty() { None } else { body::parse::<Rollback>(&bytes)?.version };
    let summary = gateway.host.rollback(&agent, version).await?;
    let details = agents::version_details(&summary);
    let warnings = agents::not_everywhere(&gateway, &summary).await.into_iter().collect();
    Ok((Extension(details), Json(Agent { warnings, ..agents::described(summary) })))
}

fn described(version: skep_runtime::AgentVersion) -> AgentVersion {
    AgentVersion {
        object: marker::Version,
        version: version.version,
        in_force: version.is_active,
        digest: version.digest,
        deployed_at_ms: version.deployed_at_ms,
        deployed_by: version.deployed_by,
        manifest: version.manifest_toml,
    }
}
