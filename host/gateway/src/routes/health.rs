//! Whether the server lives, whether it takes work, its figures, and methods that a path does not have.

use crate::{ApiError, Gateway, metrics::recorder, process_figures, store_figures};
use axum::{
    Json,
    extract::State,
    http::{Method, StatusCode, Uri, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use skep_runtime::AgentHost;
use std::time::{Duration, Instant};

/// The process lives.
pub(crate) async fn healthz() -> Json<Value> {
    Json(json!({"status": "ok"}))
}

/// Whether new work is welcome: not while the server drains, while a model's steps fail, or while nothing can be stored.
pub(crate) async fn readyz(State(gateway): State<Gateway>) -> Response {
    if *gateway.draining.borrow() {
        let error =
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "shutting_down", "the server is shutting down");
        return error.into_response();
    }
    for engine in gateway.host.models().iter() {
        if let Some(problem) = engine.problem() {
            let message = format!("the model {} cannot compute: {problem}", engine.info().name);
            return ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "model_failing", message).into_response();
        }
    }
    if let Err(refusal) = gateway.store_check.look(&gateway.host).await {
        return refusal.into_response();
    }
    let models: Vec<String> = gateway.host.models().iter().map(|engine| engine.info().name.clone()).collect();
    Json(json!({"status": "ready", "models": models, "agents": gateway.host.agents().len()})).into_response()
}

/// Whether the store takes writes, looked at once a second at most, because everyone may ask.
#[derive(Debug, Default)]
pub(crate) struct StoreCheck(tokio::sync::Mutex<Option<(Instant, Result<(), ApiError>)>>);

const CHECKED_FOR: Duration = Duration::from_secs(1);

impl StoreCheck {
    async fn look(&self, host: &AgentHost) -> Result<(), ApiError> {
        let mut last = self.0.lock().await;
        if let Some((at, result)) = &*last
            && at.elapsed() < CHECKED_FOR
        {
            return result.clone();
        }
        let result = host.store_ready().await.map_err(|error| {
            let message = format!("nothing can be stored: {error}");
            ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "store_failing", message)
        });
        *last = Some((Instant::now(), result.clone()));
        result
    }
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
    let message = format!("{} has no method {method}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}
