//! Liveness, readiness, metrics, and errors for methods that a path does not support.

use crate::{ApiError, Gateway, metrics::recorder, process_figures, store_figures};
use axum::{
    Json,
    extract::State,
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};

/// Responds as long as the process is alive.
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Reports whether the server accepts work. It does not while it drains, while a model fails, or while the store is
/// not writable.
pub(crate) async fn readyz(State(gateway): State<Gateway>) -> Response {
    if *gateway.draining.borrow() {
        let error =
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down");
        return error.into_response();
    }
    for engine in gateway.host.models().iter() {
        if let Some(problem) = engine.problem() {
            let message = format!("the model {} is failing: {problem}", engine.info().name);
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "model_failing", message).into_response();
        }
    }
    if let Err(error) = gateway.host.store_ready().await {
        let message = format!("the store is not writable: {error}");
        return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, error.code(), message).into_response();
    }
    let models: Vec<String> = gateway.host.models().iter().map(|engine| engine.info().name.clone()).collect();
    Json(json!({"status": "ready", "models": models, "agents": gateway.host.agents().len()})).into_response()
}

pub(crate) async fn metrics(State(gateway): State<Gateway>) -> Response {
    process_figures::record();
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
