//! `/v1/agents`: deploys, lists and deletes agents.

use crate::{ApiError, Gateway, access::Details, caller::Caller};
use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Multipart, Path, State, multipart::MultipartError},
    http::StatusCode,
};
use serde_json::Value;
use skep_api::{Agent, AgentDetail, Agents, BrokenAgent, Deployment, RecentTurns, Tool, marker};
use skep_runtime::{AgentSummary, FailedAgent, Manifest, ToolDefinition, ToolHints};
use std::time::Duration;

const MAX_MANIFEST_BYTES: usize = 64 << 10;
/// Timeout of receiving the form, which contains a component.
const FORM_TIMEOUT: Duration = Duration::from_secs(600);
/// Time for which an answer waits until all hosts of a cluster have started a version.
const CONFIRMING_TIME: Duration = Duration::from_secs(3);

/// Lists the agents that the caller may use.
///
/// `failed` has those that the host could not start again.
#[utoipa::path(get, path = "/v1/agents", tag = "agents", operation_id = "list_agents", responses(
    (status = 200, description = "The agents.", body = Agents),
))]
pub(crate) async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<Agents> {
    let agents = gateway.host.agents().into_iter().filter(|agent| caller.reaches(&agent.name));
    let failed = gateway.host.failed_agents().into_iter().filter(|agent| caller.reaches(&agent.name));
    let failed = failed.map(|FailedAgent { name, reason }| BrokenAgent { name, reason });
    Json(Agents { object: marker::List, ready: agents.map(described).collect(), broken: failed.collect() })
}

/// Deploys an agent from `multipart/form-data` with the parts `manifest` (the text of an agent.toml) and `component`
/// (its bytes).
#[utoipa::path(post, path = "/v1/agents", tag = "agents", operation_id = "deploy_agent",
    request_body(content = Deployment, content_type = "multipart/form-data"),
    responses(
        (status = 201, description = "The agent with its new active version.", body = Agent),
        (status = 409, description = "A route of the agent is taken or not allowed, or the host has reached its maximum number of agents: `invalid_route`, `host_full`"),
    ))]
pub(crate) async fn deploy(
    State(gateway): State<Gateway>,
    caller: Caller,
    form: Result<Multipart, axum::extract::multipart::MultipartRejection>,
) -> Result<(StatusCode, Extension<Details>, Json<Agent>), ApiError> {
    let form = form.map_err(|rejection| {
        let expected = "expected multipart/form-data with the parts `manifest` and `component`";
        ApiError::new(
            StatusCode::BAD_REQUEST,
            "invalid_form",
            format!("{expected}: {}", rejection.body_text()),
        )
    })?;
    let (manifest, component) = tokio::time::timeout(FORM_TIMEOUT, read(form)).await.map_err(|_| {
        let message = format!("the form was not received within {} s", FORM_TIMEOUT.as_secs());
        ApiError::new(StatusCode::REQUEST_TIMEOUT, "body_timeout", message)
    })??;
    let mut warnings = gateway.host.deployment_warnings(&manifest);
    let deployed = gateway.host.deploy(manifest, component.into(), &caller.name()).await?;
    warnings.extend(not_everywhere(&gateway, &deployed).await);
    let details = version_details(&deployed);
    Ok((StatusCode::CREATED, Extension(details), Json(Agent { warnings, ..described(deployed) })))
}

/// Waits until a version is active on all hosts of the cluster, for a short time. Returns a warning if it is not.
pub(super) async fn not_everywhere(gateway: &Gateway, agent: &AgentSummary) -> Option<String> {
    let AgentSummary { name, version, .. } = agent;
    match gateway.host.hosts_behind(CONFIRMING_TIME).await {
        Ok(hosts) if hosts.is_empty() => None,
        Ok(hosts) => Some(format!(
            "version {version} of {name} is not active yet on {}, which may use the version before for a moment; \
             if it stays so, look at the logs of these hosts",
            hosts.join(", ")
        )),
        Err(error) => Some(format!("cannot find out whether other hosts use version {version} yet: {error}")),
    }
}

async fn read(mut form: Multipart) -> Result<(Manifest, Bytes), ApiError> {
    let (mut manifest, mut component) = (None, None);
    while let Some(part) = form.next_field().await.map_err(form_error)? {
        match part.name() {
            Some("manifest") => {
                let bytes = part.bytes().await.map_err(form_error)?;
                if bytes.len() > MAX_MANIFEST_BYTES {
                    let message = format!(
                        "the manifest has {} bytes; at most {MAX_MANIFEST_BYTES} are allowed",
                        bytes.len()
                    );
                    return Err(ApiError::parameter("manifest", message));
                }
                let text = String::from_utf8(bytes.into())
                    .map_err(|_| ApiError::parameter("manifest", "the manifest is not UTF-8"))?;
                manifest = Some(Manifest::from_toml(&text)?);
            }
            Some("component") => component = Some(part.bytes().await.map_err(form_error)?),
            other => {
                let message = format!(
                    "unknown part {:?}; the parts are `manifest` and `component`",
                    other.unwrap_or("")
                );
                return Err(ApiError::parameter(other.unwrap_or("form"), message));
            }
        }
    }
    let missing = |part: &str| ApiError::parameter(part, format!("the part `{part}` is missing"));
    let manifest = manifest.ok_or_else(|| missing("manifest"))?;
    let component = component.ok_or_else(|| missing("component"))?;
    Ok((manifest, component))
}

/// Shows an agent with everything that its author specified.
#[utoipa::path(get, path = "/v1/agents/{agent}", tag = "agents", operation_id = "get_agent",
    params(("agent" = String, Path, description = "Name of the agent")),
    responses(
        (status = 200, description = "The agent.", body = AgentDetail),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
) -> Result<Json<AgentDetail>, ApiError> {
    let detail = in_detail(gateway.host.find_agent(&agent).await?);
    let used = caller.is_admin().then(|| gateway.host.agent_load(&agent));
    let used = used.map(|used| used.map(|(name, count)| (name.to_owned(), count)).into());
    let recent_turns = caller.is_admin().then(|| gateway.host.recent_turns(&agent)).flatten();
    Ok(Json(AgentDetail { used, recent_turns: recent_turns.map(recent), ..detail }))
}

/// Deletes an agent with its sessions and everything else that belongs to it.
#[utoipa::path(delete, path = "/v1/agents/{agent}", tag = "agents", operation_id = "delete_agent",
    params(("agent" = String, Path, description = "Name of the agent")),
    responses(
        (status = 204, description = "The agent is deleted."),
        (status = 404, description = "`agent_not_found`"),
    ))]
pub(crate) async fn delete(
    State(gateway): State<Gateway>,
    Path(agent): Path<String>,
) -> Result<StatusCode, ApiError> {
    gateway.host.delete(&agent).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Returns the audit details of a version that becomes active.
pub(super) fn version_details(agent: &AgentSummary) -> Details {
    Details(format!("agent={} version={} digest={}", agent.name, agent.version, agent.digest))
}

pub(super) fn described(agent: AgentSummary) -> Agent {
    let AgentSummary { name, version, description, digest, model, deployed_at_ms, tools, routes } = agent;
    let warnings = Vec::new();
    Agent {
        object: marker::Agent,
        name,
        version,
        description,
        digest,
        model,
        deployed_at_ms,
        tools,
        routes,
        warnings,
    }
}

fn in_detail(agent: skep_runtime::AgentDetail) -> AgentDetail {
    let AgentSummary { name, version, description, digest, model, deployed_at_ms, routes, .. } =
        agent.summary;
    let limits = agent.limits.named().map(|(name, limit)| (name.to_owned(), Value::from(limit)));
    AgentDetail {
        object: marker::Agent,
        name,
        version,
        description,
        digest,
        model,
        deployed_at_ms,
        tools: agent.tools.into_iter().map(tool).collect(),
        routes,
        manifest: agent.manifest_toml,
        limits: limits.collect(),
        used: None,
        recent_turns: None,
    }
}

fn recent(turns: skep_runtime::RecentTurns) -> RecentTurns {
    let skep_runtime::RecentTurns { turns, latest, highest } = turns;
    let by_name =
        |used: Vec<(&str, u64)>| used.into_iter().map(|(name, used)| (name.to_owned(), used)).collect();
    RecentTurns { turns: turns as u64, latest: by_name(latest), highest: by_name(highest) }
}

fn tool(tool: ToolDefinition) -> Tool {
    Tool {
        name: tool.name,
        description: tool.description,
        input_schema: tool.input_schema,
        output_schema: tool.output_schema,
        hints: hints(tool.hints),
        timeout_ms: tool.timeout_ms,
        retries: tool.retries,
        needs_approval: tool.needs_approval,
    }
}

pub(super) fn hints(hints: ToolHints) -> skep_api::ToolHints {
    let ToolHints { read_only, destructive, idempotent, open_world } = hints;
    skep_api::ToolHints { read_only, destructive, idempotent, open_world }
}

fn form_error(error: MultipartError) -> ApiError {
    match error.status() {
        StatusCode::PAYLOAD_TOO_LARGE => ApiError::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "body_too_large",
            "the component is larger than this server accepts",
        ),
        status => ApiError::new(status, "invalid_form", error.body_text()),
    }
}
