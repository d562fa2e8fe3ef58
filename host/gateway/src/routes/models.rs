//! `/v1/models`: the models, and the agents, which can be used as models.

use crate::{ApiError, Gateway, caller::Caller};
use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use skep_api::{Model, ModelList, marker};

/// Lists the models, and the agents, which can be used as models.
#[utoipa::path(get, path = "/v1/models", tag = "models", operation_id = "list_models", responses(
    (status = 200, description = "The models and agents that the caller may use.", body = ModelList),
))]
pub(crate) async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<ModelList> {
    Json(ModelList::new(models(&gateway, &caller)))
}

/// Shows a model, or an agent as a model.
#[utoipa::path(get, path = "/v1/models/{model}", tag = "models", operation_id = "get_model",
    params(("model" = String, Path, description = "Name of the model, or `agent:NAME`")),
    responses(
        (status = 200, description = "The model.", body = Model),
        (status = 404, description = "`model_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(model): Path<String>,
) -> Result<Json<Model>, ApiError> {
    let found = models(&gateway, &caller).into_iter().find(|known| known.id == model);
    found.map(Json).ok_or_else(|| {
        let message = format!("model {model:?} does not exist; GET /v1/models lists the models");
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    })
}

/// Returns the models and agents that the caller may use.
fn models(gateway: &Gateway, caller: &Caller) -> Vec<Model> {
    let models =
        gateway.host.models().iter().filter(|model| caller.may_use(gateway, model).is_ok()).map(|model| {
            Model {
                id: model.name().to_owned(),
                object: marker::Model,
                created: model.created_unix_s(),
                owned_by: model.name().split_once('/').map_or("skep", |(upstream, _)| upstream).to_owned(),
                context_length: model.context_length().map(|tokens| tokens as u64),
                description: None,
            }
        });
    let agents = gateway.host.agents();
    let agents = agents.into_iter().filter(|agent| caller.reaches(&agent.name)).map(|agent| Model {
        id: format!("agent:{}", agent.name),
        object: marker::Model,
        created: agent.deployed_at_ms / 1000,
        owned_by: "agent".to_owned(),
        context_length: None,
        description: Some(agent.description),
    });
    models.chain(agents).collect()
}
