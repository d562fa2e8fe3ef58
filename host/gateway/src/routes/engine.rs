//! `/v1/engine`: what the engines did over the last hour, and who owns the pages of the KV cache.

use crate::{
    ApiError, Gateway,
    caller::Caller,
    figures::{KEPT, Sample},
    sse::{self, Message, Step, Writer},
};
use axum::{
    Json,
    extract::{Query, State},
    http::StatusCode,
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde::Deserialize;
use skep_api::{EngineFigures, KvPageOwner, KvPageOwners, marker};
use skep_engine::PageOwner;
use std::sync::Arc;
use tokio::sync::broadcast::error::RecvError;
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct FiguresQuery {
    /// Streams the figures of each further second as events `sample`.
    #[serde(default)]
    stream: bool,
    /// Number of seconds to show, 1 to 3600; the default is 3600.
    seconds: Option<usize>,
}

/// Shows the figures of the engines for each second of the last hour.
#[utoipa::path(get, path = "/v1/engine", tag = "models", operation_id = "get_engine", params(FiguresQuery), responses(
    (status = 200, content(
        (EngineFigures = "application/json"),
        (skep_api::EngineSample = "text/event-stream"),
    ), description = "The figures, or a stream of the samples to come."),
))]
pub(crate) async fn figures(
    State(gateway): State<Gateway>,
    Query(query): Query<FiguresQuery>,
) -> Result<Response, ApiError> {
    if query.stream {
        return Ok(follow(&gateway));
    }
    let seconds = query.seconds.unwrap_or(KEPT);
    if !(1..=KEPT).contains(&seconds) {
        let message = format!("seconds is {seconds}; it must be 1 to {KEPT}");
        return Err(ApiError::parameter("seconds", message));
    }
    let figures: EngineFigures = gateway.figures.columns(&gateway, seconds);
    Ok(Json(figures).into_response())
}

fn follow(gateway: &Gateway) -> Response {
    let mut draining = gateway.draining.subscribe();
    let shutdown = async move {
        // A server that is gone does not wait for the stream either.
        let _ = draining.wait_for(|draining| *draining).await;
    };
    let samples = stream::unfold(gateway.figures.follow(), |mut followed| async {
        loop {
            match followed.recv().await {
                Ok(sample) => return Some((sample, followed)),
                // A client that is too slow misses samples.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return None,
            }
        }
    });
    sse::respond(samples.take_until(Box::pin(shutdown)).boxed(), Samples)
}

struct Samples;

impl Writer for Samples {
    type Item = Arc<Sample>;

    fn write(&mut self, sample: Arc<Sample>) -> Step {
        Step::Go(vec![Message::named("sample", &sample.described())])
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct PagesQuery {
    /// The model; the default is the host's default model.
    model: Option<String>,
}

/// Shows who owns the pages of a model's KV cache.
#[utoipa::path(get, path = "/v1/engine/pages", tag = "models", operation_id = "get_kv_pages", params(PagesQuery), responses(
    (status = 200, description = "The owners, those with the most pages first.", body = KvPageOwners),
    (status = 404, description = "`model_not_found`"),
))]
pub(crate) async fn pages(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<PagesQuery>,
) -> Result<Json<KvPageOwners>, ApiError> {
    let models = gateway.host.models();
    let engine = match &query.model {
        Some(name) => models.engines().find(|engine| engine.info().name == *name),
        None => models.engines().next(),
    };
    let engine = engine.ok_or_else(|| {
        let name = query.model.as_deref().unwrap_or("any");
        let message = format!("no local model is loaded as {name:?}; GET /v1/models lists the models");
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    })?;
    let owners: Vec<PageOwner> = engine.page_owners().await.into_iter().flatten().collect();
    let owned: usize = owners.iter().map(|owner| owner.pages).sum();
    let total = engine.stats().pages_total;
    let mut owners: Vec<KvPageOwner> = owners.into_iter().map(|owner| described(owner, &caller)).collect();
    owners.sort_by_key(|owner| std::cmp::Reverse(owner.pages));
    Ok(Json(KvPageOwners {
        object: marker::KvPageOwners,
        model: engine.info().name.clone(),
        page_tokens: engine.page_tokens() as u64,
        total: total as u64,
        free: total.saturating_sub(owned) as u64,
        owners,
    }))
}

fn described(owner: PageOwner, caller: &Caller) -> KvPageOwner {
    let PageOwner { tenant, agent, session, is_running, pages } = owner;
    KvPageOwner {
        tenant,
        agent,
        session: session.map(|session| caller.name_of(&session)),
        kind: if is_running { "running" } else { "cached" }.to_owned(),
        pages: pages as u64,
    }
}
