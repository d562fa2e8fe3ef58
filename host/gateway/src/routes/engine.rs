//! `/v1/engine`: what the engines did over the last hour, the work of experts and ranks, and who owns the pages of the KV cache.

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
use skep_api::{EngineFigures, EngineLoad, ExpertLayer, KvPageOwner, KvPageOwners, RankTime, marker};
use skep_engine::{Engine, PageOwner};
use std::{sync::Arc, time::Duration};
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
pub(crate) struct ModelQuery {
    /// The model; the default is the host's default model.
    model: Option<String>,
}

/// Shows the work of a model's experts and ranks since it was loaded.
#[utoipa::path(get, path = "/v1/engine/load", tag = "models", operation_id = "get_engine_load", params(ModelQuery), responses(
    (status = 200, description = "The tokens of each expert of each layer, and the time of each rank.", body = EngineLoad),
    (status = 404, description = "`model_not_found`"),
))]
pub(crate) async fn load(
    State(gateway): State<Gateway>,
    Query(query): Query<ModelQuery>,
) -> Result<Json<EngineLoad>, ApiError> {
    let engine = local(&gateway, query.model.as_deref())?;
    let experts = engine.expert_load().into_iter();
    let experts = experts.map(|load| ExpertLayer { layer: load.layer as u64, tokens: load.tokens });
    Ok(Json(EngineLoad {
        object: marker::EngineLoad,
        model: engine.info().name.clone(),
        experts: experts.collect(),
        ranks: rank_times(&engine),
    }))
}

/// Returns the times of the ranks of all replicas with the places of the ranks.
fn rank_times(engine: &Engine) -> Vec<RankTime> {
    let mut ranks = Vec::new();
    let replicas = engine.info().replica_memory.iter().zip(engine.rank_times());
    for (replica, (memory, times)) in replicas.enumerate() {
        ranks.extend(memory.ranks.iter().zip(times).map(|(place, time)| RankTime {
            replica: replica as u64,
            stage: place.stage as u64,
            shard: place.shard as u64,
            steps: time.steps,
            computing_us: microseconds(time.computing),
            waiting_us: microseconds(time.waiting),
        }));
    }
    ranks
}

fn microseconds(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

/// Returns the engine of a model, or of the first one that has an engine.
fn local(gateway: &Gateway, model: Option<&str>) -> Result<Engine, ApiError> {
    let models = gateway.host.models();
    let engine = match model {
        Some(name) => models.engines().find(|engine| engine.info().name == name),
        None => models.engines().next(),
    };
    engine.ok_or_else(|| {
        let name = model.unwrap_or("any");
        let message = format!("no local model is loaded as {name:?}; GET /v1/models lists the models");
        ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message)
    })
}

/// Shows who owns the pages of a model's KV cache.
#[utoipa::path(get, path = "/v1/engine/pages", tag = "models", operation_id = "get_kv_pages", params(ModelQuery), responses(
    (status = 200, description = "The owners, those with the most pages first.", body = KvPageOwners),
    (status = 404, description = "`model_not_found`"),
))]
pub(crate) async fn pages(
    State(gateway): State<Gateway>,
    caller: Caller,
    Query(query): Query<ModelQuery>,
) -> Result<Json<KvPageOwners>, ApiError> {
    let engine = local(&gateway, query.model.as_deref())?;
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
