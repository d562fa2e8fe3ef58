//! `/v1/models`: the models, and the agents, which can be used as models.

use crate::{ApiError, Gateway, caller::Caller};
use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use serde_json::{Value, json};

pub(crate) async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<Value> {
    Json(json!({"object": "list", "data": models(&gateway, &caller)}))
}

pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(model): Path<String>,
) -> Result<Json<Value>, ApiError> {
    let known = models(&gateway, &caller);
    let found = known.iter().find(|known| known["id"] == model);
    found.cloned().map(Json).ok_or_else(|| {
        let message = format!("model {model:?} does not exist; GET /v1/models lists the models");
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    })
}

/// Returns the models and agents that the caller may use.
fn models(gateway: &Gateway, caller: &Caller) -> Vec<Value> {
    let models = gateway.host.models().iter().filter(|_| caller.may_reach_models().is_ok()).map(|engine| {
        let info = engine.info();
        json!({
            "id": info.name,
            "object": "model",
            "created": info.created_unix_s,
            "owned_by": "skep",
            "context_length": info.context_length,
        })
    });
    let agents = gateway.host.agents();
    let agents = agents.iter().filter(|agent| caller.reaches(&agent.name)).map(|agent| {
        json!({
            "id": format!("agent:{}", agent.name),
            "object": "model",
            "created": agent.deployed_at_ms / 1000,
            "owned_by": "agent",
            "description": agent.description,
        })
    });
    models.chain(agents).collect()
}
