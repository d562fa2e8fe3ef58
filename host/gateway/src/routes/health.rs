//! Liveness, readiness, metrics, and errors for methods that a path does not support.

use crate::{ApiError, Gateway, device_figures, metrics::recorder, process_figures, store_figures};
use axum::{
    Json,
    extract::State,
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use skep_api::{Health, Readiness, marker};

/// Responds as long as the process is alive.
#[utoipa::path(get, path = "/healthz", tag = "host", operation_id = "get_health", responses(
    (status = 200, description = "The process is alive.", body = Health),
))]
pub(crate) async fn healthz() -> Json<Health> {
    Json(Health { status: marker::Ok })
}

/// Reports whether the server accepts work. It does not while it drains, while a model fails, or while the store is
/// not writable. In a cluster, it does not while the host hands its sessions over.
#[utoipa::path(get, path = "/readyz", tag = "host", operation_id = "get_readiness", responses(
    (status = 200, description = "The server accepts work.", body = Readiness),
    (status = 503, description = "The server accepts no work: `shutting_down`, `draining`, `model_failing` or an error of the store."),
))]
pub(crate) async fn readyz(State(gateway): State<Gateway>) -> Response {
    if *gateway.draining.borrow() {
        let error =
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down");
        return error.into_response();
    }
    if gateway.host.is_draining() {
        let message = "the host hands its sessions over to the other hosts of its cluster, and then ends";
        return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "draining", message).into_response();
    }
    for engine in gateway.host.models().engines() {
        if let Some(problem) = engine.problem() {
            let message = format!("the model {} is failing: {problem}", engine.info().name);
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "model_failing", message).into_response();
        }
    }
    if let Err(error) = gateway.host.store_ready().await {
        let message = format!("the store is not writable: {error}");
        return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.code(), message).into_response();
    }
    let models: Vec<String> =
        gateway.host.models().served().iter().map(|model| model.name().to_owned()).collect();
    let agents = gateway.host.agents().len() as u64;
    Json(Readiness { status: marker::Ready, models, agents }).into_response()
}

/// Returns the host's metrics.
///
/// The host's configuration decides whether the route needs a key.
#[utoipa::path(get, path = "/metrics", tag = "host", operation_id = "get_metrics", responses(
    (status = 200, description = "Metrics in the text format of Prometheus.", body = String, content_type = "text/plain"),
))]
pub(crate) async fn metrics(State(gateway): State<Gateway>) -> Response {
    process_figures::record();
    device_figures::record().await;
    gateway.load.record(&gateway.host);
    store_figures::record(&gateway.host).await;
    let text = recorder().map(|recorder| {
        recorder.run_upkeep();
        recorder.render()
    });
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text.unwrap_or_default()).into_response()
}

pub(crate) async fn method_not_allowed(method: Method, uri: Uri) -> ApiError {
    let message = format!("{} does not support the method {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}
