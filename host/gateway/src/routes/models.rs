//! `/v1/models`: the models, and the agents, which can be used as models.

use crate::{ApiError, Gateway, caller::Caller};
use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
};
use skep_api::{Model, ModelCapabilities, ModelDetails, ModelList, SamplingDefaults, marker};
use skep_engine::{ModelSet, ModelState, ServedModel};

/// Lists the models, and the agents, which can be used as models.
#[utoipa::path(get, path = "/v1/models", tag = "models", operation_id = "list_models", responses(
    (status = 200, description = "The models and agents that the caller may use.", body = ModelList),
))]
pub(crate) async fn list(State(gateway): State<Gateway>, caller: Caller) -> Json<ModelList> {
    Json(ModelList::new(models(&gateway, &caller)))
}

/// Shows a model, or an agent as a model.
#[utoipa::path(get, path = "/v1/models/{*model}", tag = "models", operation_id = "get_model",
    params(("model" = String, Path, description = "Name or alias of the model, or `agent:NAME`. It may contain slashes.")),
    responses(
        (status = 200, description = "The model.", body = Model),
        (status = 404, description = "`model_not_found`"),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(model): Path<String>,
) -> Result<Json<Model>, ApiError> {
    let is_named = |known: &Model| {
        known.id == model || known.skep.as_ref().is_some_and(|details| details.aliases.contains(&model))
    };
    let found = models(&gateway, &caller).into_iter().find(is_named);
    found.map(Json).ok_or_else(|| {
        let message = format!("model {model:?} does not exist; GET /v1/models lists the models");
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    })
}

/// Returns the models and agents that the caller may use.
fn models(gateway: &Gateway, caller: &Caller) -> Vec<Model> {
    let models = gateway.host.models().served();
    let models = models.iter().filter(|model| caller.may_use(gateway, model).is_ok());
    let agents = gateway.host.agents();
    let agents = agents.into_iter().filter(|agent| caller.reaches(&agent.name)).map(|agent| Model {
        id: format!("agent:{}", agent.name),
        object: marker::Model,
        created: agent.deployed_at_ms / 1000,
        owned_by: "agent".to_owned(),
        context_length: None,
        description: Some(agent.description),
        skep: None,
    });
    models.map(|model| described(gateway.host.models(), model)).chain(agents).collect()
}

/// Returns the description of a model.
pub(super) fn described(models: &ModelSet, model: &ServedModel) -> Model {
    let name = model.name().to_owned();
    let (abilities, hosts) = (model.abilities(), model.hosts());
    let (message, percent) = match model.state() {
        ModelState::Loading { step, percent } => (Some(step), percent),
        ModelState::Failed(reason) => (Some(reason), None),
        _ => (None, None),
    };
    Model {
        object: marker::Model,
        created: model.created_unix_s(),
        owned_by: name.split_once('/').map_or("skep", |(upstream, _)| upstream).to_owned(),
        context_length: model.context_length().map(|tokens| tokens as u64),
        description: None,
        skep: Some(ModelDetails {
            state: model.state().name().to_owned(),
            message,
            percent,
            is_default: models.default_name() == name,
            aliases: models.aliases_of(&name),
            markup: model.markup().map(str::to_owned),
            location: match model {
                ServedModel::Local(_) => "local".to_owned(),
                ServedModel::Remote(_) if !hosts.is_empty() => "cluster".to_owned(),
                ServedModel::Remote(_) => "upstream".to_owned(),
            },
            hosts,
            quantization: model.weights().map(str::to_owned),
            max_output: abilities.max_output.map(|tokens| tokens as u64),
            capabilities: ModelCapabilities {
                tools: abilities.tools,
                json_schema: abilities.json_schema,
                reasoning: abilities.reasoning,
                images: abilities.images,
                // No route makes any.
                embeddings: false,
                tokens: abilities.tokens,
            },
            sampling: model.sampling().map(|sampling| SamplingDefaults {
                temperature: sampling.temperature,
                top_p: sampling.top_p,
                top_k: sampling.top_k,
                min_p: sampling.min_p,
                repetition_penalty: sampling.repetition_penalty,
            }),
        }),
        id: name,
    }
}
