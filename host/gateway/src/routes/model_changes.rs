//! `POST /v1/models`: loads and unloads models and points aliases at them, while the host runs.

use crate::{ApiError, Gateway, access::Details, body::JsonBody, routes::models::described};
use axum::{Extension, Json, extract::State, http::StatusCode};
use skep_api::{ChangeModel, Model, ModelAction};
use std::time::Duration;

/// Time that running requests and turns may continue while their model is unloaded.
const DRAIN: Duration = Duration::from_secs(30);
const MAX_DRAIN_S: u64 = 86_400;

/// Loads or unloads a model, or points an alias at it.
///
/// A load or an unload continues in the background, and `GET /v1/models/{model}` shows how far it is. A request
/// loads a model that was never loaded, was idle, or is declared as loaded on demand. Aliases are as configured again after the
/// next start.
#[utoipa::path(post, path = "/v1/models", tag = "models", operation_id = "change_model", request_body = ChangeModel,
    responses(
        (status = 200, description = "The model, which is as asked for.", body = Model),
        (status = 202, description = "The model, which is being loaded or unloaded.", body = Model),
        (status = 404, description = "`model_not_found`"),
        (status = 503, description = "`model_unloaded`: the load failed; `model_loading`: another change of the model is under way."),
    ))]
pub(crate) async fn change(
    State(gateway): State<Gateway>,
    JsonBody(body): JsonBody<ChangeModel>,
) -> Result<(StatusCode, Extension<Details>, Json<Model>), ApiError> {
    let models = gateway.host.models();
    let name = models.find(Some(&body.model))?.name().to_owned();
    let action = body.action;
    let mut details = format!("model={name} action={}", action.as_str());
    match (action, &body.alias) {
        (ModelAction::Alias, Some(alias)) => {
            models.set_alias(alias, &name)?;
            details.push_str(&format!(" alias={alias}"));
        }
        (ModelAction::Alias, None) => {
            return Err(ApiError::parameter(
                "alias",
                "`alias` is missing; it is the name to point at the model",
            ));
        }
        (_, Some(_)) => {
            return Err(ApiError::parameter("alias", "`alias` is only for the action `alias`"));
        }
        (ModelAction::Load, None) => models.load(&name)?,
        (ModelAction::Unload, None) => {
            let drain_s = body.drain_s.filter(|drain_s| *drain_s <= MAX_DRAIN_S);
            if drain_s != body.drain_s {
                let message = format!("drain_s is too long; at most {MAX_DRAIN_S} are allowed");
                return Err(ApiError::parameter("drain_s", message));
            }
            models.unload(&name, drain_s.map_or(DRAIN, Duration::from_secs))?;
        }
    }
    if body.wait {
        models.settled(&name).await?;
    }
    if action == ModelAction::Load && body.wait {
        // The error says why the load failed.
        models.get(Some(&name))?;
    }
    let model = described(models, &models.find(Some(&name))?);
    let is_settled =
        model.skep.as_ref().is_none_or(|details| !["loading", "unloading"].contains(&details.state.as_str()));
    let status = if is_settled { StatusCode::OK } else { StatusCode::ACCEPTED };
    Ok((status, Extension(Details(details)), Json(model)))
}
