//! Batches of Workers AI: queued and fetched at `/ai/run/{model}`, inspected and cancelled at `/ai/batches/{id}`.

use crate::{
    ApiError, Gateway,
    body::run_on_compute,
    caller::Caller,
    openai::fields::Fields,
    workers_ai::{batch, failure::Failure, success},
};
use axum::{
    Json,
    extract::{Path, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use serde_json::Value;
use skep_engine::Cancel;
use skep_runtime::{AGENT_MODEL, BatchItem, NewBatch};

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
    let read = move |_: &Cancel| match fields.take::<Vec<Fields>>("requests")? {
        Some(requests) => requests
            .into_iter()
            .enumerate()
            .map(|(index, fields)| batch::item(fields, is_for_agent).map_err(|error| batch::at(index, error)))
            .collect::<Result<Vec<BatchItem>, ApiError>>(),
        None => Ok(vec![batch::item(fields, is_for_agent)?]),
    };
    let items = run_on_compute(gateway, caller.tenant.as_str(), body_bytes, read).await?;
    let batch = NewBatch { principal: caller.tenant.into(), model, items };
    let status = gateway.host.queue_batch(batch).await?;
    Ok(Json(success(batch::standing(&status))).into_response())
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
    let answer = match results {
        Some(results) => batch::responses(results),
        None => batch::standing(&status),
    };
    Ok(Json(success(answer)).into_response())
}

pub(crate) async fn show(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    let status = gateway.host.batch(caller.tenant.as_str(), &id).await.map_err(ApiError::from)?;
    Ok(Json(success(batch::detail(&status))))
}

pub(crate) async fn cancel(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(id): Path<String>,
) -> Result<Json<Value>, Failure> {
    gateway.host.cancel_batch(caller.tenant.as_str(), &id).await.map_err(ApiError::from)?;
    let status = gateway.host.batch(caller.tenant.as_str(), &id).await.map_err(ApiError::from)?;
    Ok(Json(success(batch::detail(&status))))
}
