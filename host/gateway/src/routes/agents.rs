//! `/v1/agents`: deploys, lists and deletes agents.

use crate::{ApiError, Gateway, access::Details, caller::Caller};
use axum::{
    Extension, Json,
    body::Bytes,
    extract::{Multipart, Path, State, multipart::MultipartError},
    http::StatusCode,
};
use serde_json::{Value, json};
use skep_runtime::{AgentDetail, AgentSummary, Manifest};
use std::time::Duration;

const MAX_MANIFEST_BYTES: usize = 64 << 10;
/// Timeout of receiving the form, which contains a component.
const FORM_TIMEOUT: Duration = Duration::from_secs(600);

pub(crate) async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<Value> {
    let agents = gateway.host.agents();
    let agents: Vec<Value> =
        agents.iter().filter(|agent| caller.reaches(&agent.name)).map(summary_json).collect();
    let failed = gateway.host.failed_agents();
    let failed = failed.iter().filter(|agent| caller.reaches(&agent.name));
    let failed: Vec<Value> =
        failed.map(|agent| json!({"name": agent.name, "reason": agent.reason})).collect();
    Json(json!({"object": "list", "data": agents, "failed": failed}))
}

/// Deploys an agent from `multipart/form-data` with the parts `manifest` (the text of an agent.toml) and `component`
/// (its bytes).
pub(crate) async fn deploy(
    State(gateway): State<Gateway>,
    caller: Caller,
    form: Result<Multipart, axum::extract::multipart::MultipartRejection>,
) -> Result<(StatusCode, Extension<Details>, Json<Value>), ApiError> {
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
    let warnings = gateway.host.deployment_warnings(&manifest);
    let deployed = gateway.host.deploy(manifest, component.into(), &caller.name()).await?;
    let mut value = summary_json(&deployed);
    value["warnings"] = json!(warnings);
    Ok((StatusCode::CREATED, Extension(version_details(&deployed)), Json(value)))
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

pub(crate) async fn show(
    State(gateway): State<Gateway>,
    Path(agent): Path<String>,
) -> Result<Json<Value>, ApiError> {
    Ok(Json(detail_json(&gateway.host.agent(&agent)?)))
}

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

pub(super) fn summary_json(agent: &AgentSummary) -> Value {
    json!({
        "object": "agent",
        "name": agent.name,
        "version": agent.version,
        "description": agent.description,
        "digest": agent.digest,
        "model": agent.model,
        "deployed_at_ms": agent.deployed_at_ms,
        "tools": agent.tools,
        "routes": agent.routes,
    })
}

fn detail_json(agent: &AgentDetail) -> Value {
    let mut value = summary_json(&agent.summary);
    value["manifest"] = json!(agent.manifest_toml);
    let limits = agent.limits.named().map(|(name, limit)| (name.to_owned(), json!(limit)));
    value["limits"] = Value::Object(limits.collect());
    let tools = agent.tools.iter().map(|tool| {
        json!({
            "name": tool.name,
            "description": tool.description,
            "input_schema": tool.input_schema,
            "output_schema": tool.output_schema,
            "hints": {
                "read_only": tool.hints.read_only,
                "destructive": tool.hints.destructive,
                "idempotent": tool.hints.idempotent,
                "open_world": tool.hints.open_world,
            },
            "timeout_ms": tool.timeout_ms,
            "retries": tool.retries,
            "needs_approval": tool.needs_approval,
        })
    });
    value["tools"] = tools.collect();
    value
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
