//! Batches of Workers AI: queued and fetched at `/ai/run/{model}`, inspected and cancelled at `/ai/batches/{id}`.

use crate::{
    ApiError, Gateway,
    body::run_on_compute,
    caller::Caller,
    openai::fields::Fields,
    workers_ai::{batch, failure::Failure},
};
use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use skep_api::{AiEnvelope, BatchStatusEnvelope};
use skep_engine::Cancel;
use skep_runtime::{AGENT_MODEL, BatchItem, BatchTerms, NewBatch};

/// Queues the requests of a body of this size: those under `requests`, or the body itself.
pub(super) async fn queue(
    gateway: &Gateway,
    caller: Caller,
    model: String,
    mut fields: Fields,
    body_bytes: usize,
) -> Result<Response, ApiError> {
    if body_bytes >= batch::MAX_BATCH_BYTES {
        let most = batch::MAX_BATCH_BYTES;
        let message = format!(
            "a batch must be smaller than {most} bytes, and this one has {body_bytes}; split it into several"
        );
        return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, "body_too_large", message));
    }
    let is_for_agent = model.starts_with(AGENT_MODEL);
    // A model whose files are not on this machine yet has no known defaults, unless it is in the catalog.
    let served = gateway.host.models().find(Some(&model)).ok();
    let defaults = served.and_then(|model| model.sampling()).unwrap_or_default();
    let read = move |_: &Cancel| match fields.take::<Vec<Fields>>("requests")? {
        Some(requests) => requests
            .into_iter()
            .enumerate()
            .map(|(index, fields)| {
                batch::item(fields, is_for_agent, &defaults).map_err(|error| batch::at(index, error))
            })
            .collect::<Result<Vec<BatchItem>, ApiError>>(),
        None => Ok(vec![batch::item(fields, is_for_agent, &defaults)?]),
    };
    let items = run_on_compute(gateway, caller.tenant.as_str(), body_bytes, read).await?;
    let batch = NewBatch {
        key: caller.key().map(str::to_owned),
        principal: caller.tenant.into(),
        model,
        items,
        terms: BatchTerms::default(),
    };
    let status = gateway.host.queue_batch(batch).await?;
    Ok(Json(AiEnvelope::success(batch::standing(&status))).into_response())
}

/// Returns the results of a batch, or its status if it is not done.
pub(super) async fn fetch(
    gateway: &Gateway,
    caller: &Caller,
    model: &str,
    id: &str,
) -> Result<Response, ApiError> {
    let (status, results) = gateway.host.batch_results(caller.tenant.as_str(), id).await?;
    if status.model != model {
        let message =
            format!("the batch {} belongs to the model {}; request it there", status.id, status.model);
        return Err(ApiError::parameter("request_id", message));
    }
    Ok(match results {
        Some(results) => Json(AiEnvelope::success(batch::responses(results))).into_response(),
        None => Json(AiEnvelope::success(batch::standing(&status))).into_response(),
    })
}

/// Shows the state of a batch, without its answers.
#[utoipa::path(get, path = "/ai/batches/{id}", tag = "batches", operation_id = "get_batch",
    params(("id" = String, Path, description = "Id of the batch, which is the `request_id` of its answers")),
    responses(
        (status = 200, description = "The state of the batch.", body = BatchStatusEnvelope),
        (status = 404, description = "There is no such batch of the caller's tenant."),
    ))]
pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<BatchStatusEnvelope>, Failure> {
    let status = gateway.host.batch(caller.tenant.as_str(), &id).await.map_err(ApiError::from)?;
    Ok(Json(AiEnvelope::success(batch::detail(&status))))
}

/// Cancels a batch: items that have not been started are not answered.
#[utoipa::path(delete, path = "/ai/batches/{id}", tag = "batches", operation_id = "cancel_batch",
    params(("id" = String, Path, description = "Id of the batch, which is the `request_id` of its answers")),
    responses(
        (status = 200, description = "The state of the batch.", body = BatchStatusEnvelope),
        (status = 404, description = "There is no such batch of the caller's tenant."),
    ))]
pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<BatchStatusEnvelope>, Failure> {
    gateway.host.cancel_batch(caller.tenant.as_str(), &id).await.map_err(ApiError::from)?;
    let status = gateway.host.batch(caller.tenant.as_str(), &id).await.map_err(ApiError::from)?;
    Ok(Json(AiEnvelope::success(batch::detail(&status))))
}
