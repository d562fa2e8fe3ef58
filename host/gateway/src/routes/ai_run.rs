//! `/ai/run/{model}`: inference as in Workers AI, with responses in its schema or OpenAI's, immediate or from a
//! queue.

use super::{ai_batches, chat_completions::StartedChat};
use crate::{
    ApiError, Gateway,
    body::{self, run_on_compute},
    caller::Caller,
    headers, sse,
    workers_ai::{
        failure::Failure,
        native::{self, NativeWriter},
        request::{RunRequest, Schema},
    },
};
use axum::{
    Json,
    extract::{Path, Query, Request, State, rejection::QueryRejection},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde::Deserialize;
use skep_api::{
    AiAnswerEnvelope, AiBatchAnswersEnvelope, AiChunk, AiEnvelope, ChatChunk, ChatCompletionEnvelope,
    ErrorBody, QueuedBatchEnvelope,
};
use skep_engine::{Cancel, EngineError, Priority, ServedModel, chat::ChatEvent};
use skep_runtime::{AGENT_MODEL, Surface, excerpt};
use std::sync::Arc;
use utoipa::{IntoParams, ToSchema};

/// Options that may be in the query, in the body, or in the body's `options`.
#[derive(Clone, Copy, Debug, Default, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct RunOptions {
    /// Whether to refuse the request instead of waiting until there is room.
    reject_if_busy: bool,
    /// Whether to respond with the id of a batch and run the request when there is room.
    queue_request: bool,
}

/// The answer to a request, by what it asks for.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the answer")]
enum RunAnswer {
    Native(AiAnswerEnvelope),
    OpenAi(ChatCompletionEnvelope),
    Queued(QueuedBatchEnvelope),
    Batch(AiBatchAnswersEnvelope),
}

/// A piece of a streamed answer, in the native schema or in OpenAI's.
#[derive(ToSchema)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the answer")]
enum RunChunk {
    Native(AiChunk),
    OpenAi(ChatChunk),
    Broken(ErrorBody),
}

/// The model that a path names.
enum Target {
    Model(ServedModel),
    /// An agent, named as `agent:NAME`.
    Agent(String),
}

/// The last part of the path, with any prefix.
#[derive(Deserialize)]
pub(crate) struct ModelPath {
    model: String,
}

/// Runs a model in the shapes of Workers AI: answers at once, streams, queues a batch, or fetches the answers of a batch.
#[utoipa::path(post, path = "/ai/run/{*model}", tag = "models", operation_id = "run_model",
    params(("model" = String, Path,
        description = "Name of a model, with any prefix such as `@cf/vendor/`; or `agent:NAME`, in a batch. It may contain slashes."),
        RunOptions),
    request_body = crate::openai::schema::AiRunRequest,
    responses(
        (status = 200, description = "The answer in Workers AI's native schema or in OpenAI's; a queued batch; or the answers of one.",
            content((RunAnswer = "application/json"), (RunChunk = "text/event-stream"))),
        (status = 404, description = "There is no batch of the caller's tenant with this `request_id`."),
        (status = 405, description = "The request has `lora`, which no model supports."),
        (status = 422, description = "The answer did not satisfy its schema, or was cut off."),
    ))]
pub(crate) async fn run(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(ModelPath { model }): Path<ModelPath>,
    in_query: Result<Query<RunOptions>, QueryRejection>,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, Failure> {
    answer(gateway, caller, model, in_query, headers, request).await
}

/// Does the same as `/ai/run/{model}`, for clients that name an account. The account is ignored.
#[utoipa::path(post, path = "/client/v4/accounts/{account}/ai/run/{*model}", tag = "models", operation_id = "run_model_of_account",
    params(
        ("account" = String, Path, description = "Any name"), ("model" = String, Path,
        description = "Name of a model, with any prefix such as `@cf/vendor/`; or `agent:NAME`, in a batch. It may contain slashes."),
        RunOptions),
    request_body = crate::openai::schema::AiRunRequest,
    responses(
        (status = 200, description = "The answer in Workers AI's native schema or in OpenAI's; a queued batch; or the answers of one.",
            content((RunAnswer = "application/json"), (RunChunk = "text/event-stream"))),
        (status = 404, description = "There is no batch of the caller's tenant with this `request_id`."),
        (status = 405, description = "The request has `lora`, which no model supports."),
        (status = 422, description = "The answer did not satisfy its schema, or was cut off."),
    ))]
pub(crate) async fn run_of_account(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path(ModelPath { model }): Path<ModelPath>,
    in_query: Result<Query<RunOptions>, QueryRejection>,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, Failure> {
    answer(gateway, caller, model, in_query, headers, request).await
}

async fn answer(
    gateway: Gateway,
    caller: Caller,
    model: String,
    in_query: Result<Query<RunOptions>, QueryRejection>,
    headers: HeaderMap,
    request: Request,
) -> Result<Response, Failure> {
    let Query(in_query) = in_query.map_err(|rejection| {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_value", rejection.body_text())
    })?;
    let (target, asked) = (target_of(&gateway, &model)?, model);
    let bytes = body::read(request, &gateway).await?;
    let (tenant, size) = (caller.tenant.to_string(), bytes.len());
    let mut fields = run_on_compute(&gateway, &tenant, size, move |_| body::parse_fields(&bytes)).await?;
    let in_body = fields.take::<RunOptions>("options")?.unwrap_or_default();
    let mut asks_for = |name: &str| fields.take(name).map(|asked| asked.unwrap_or(false));
    let at_top =
        RunOptions { reject_if_busy: asks_for("rejectIfBusy")?, queue_request: asks_for("queueRequest")? };
    let options = [in_query, in_body, at_top];
    if let Target::Model(model) = &target {
        caller.may_use(&gateway, model)?;
    }
    if let Some(id) = fields.take::<String>("request_id")? {
        return Ok(ai_batches::fetch(&gateway, &caller, target.name(), &id).await?);
    }
    if options.iter().any(|options| options.queue_request) {
        return Ok(ai_batches::queue(&gateway, caller, target.name().to_owned(), fields, size).await?);
    }
    if fields.has("requests") {
        let message = "several `requests` are a batch: add ?queueRequest=true to the URL";
        return Err(ApiError::parameter("requests", message).into());
    }
    let model = match target {
        Target::Model(model) => {
            gateway.host.models().ready(Some(model.name())).await.map_err(ApiError::from)?
        }
        Target::Agent(name) => {
            let bare = name.strip_prefix(AGENT_MODEL).unwrap_or(&name);
            gateway.host.agent(bare).map_err(ApiError::from)?;
            let message = format!(
                "{name} is an agent; use it at /v1/agents, at /v1/chat/completions, or here in a batch: add \
                 ?queueRequest=true to the URL"
            );
            return Err(ApiError::new(StatusCode::BAD_REQUEST, "model_not_found", message).into());
        }
    };
    let read = move |_: &Cancel| RunRequest::read(fields);
    let RunRequest { schema, body } = run_on_compute(&gateway, &tenant, size, read).await?;
    let body = Arc::new(body);
    let rejects_if_busy = options.iter().any(|options| options.reject_if_busy);
    if rejects_if_busy && model.free_slots(Priority::Interactive) == 0 {
        return Err(ApiError::from(EngineError::Busy { retry_after_ms: RETRY_AFTER_MS }).into());
    }
    let observer = caller.observer(&gateway, Surface::AiRun, Some(&asked), body.parameters.streams());
    let affinity = headers::affinity(&headers, &caller)?;
    let chat = StartedChat::start(&gateway, &caller, (model, observer), affinity, &body).await?;
    let (warnings, served) = (chat.warnings.clone(), chat.served());
    let response = match (schema, body.parameters.streams()) {
        (Schema::OpenAi, true) => chat.stream(body.parameters.streams_usage()),
        (Schema::OpenAi, false) => Json(AiEnvelope::success(chat.whole().await?)).into_response(),
        (Schema::Native, true) => native_stream(chat),
        (Schema::Native, false) => native_whole(chat, body.wants_json()).await?,
    };
    Ok(headers::served(headers::warned(response, &warnings), &served))
}

/// Retry delay that is sent to a client that asked to be refused instead of waiting for room.
const RETRY_AFTER_MS: u32 = 1_000;

impl Target {
    fn name(&self) -> &str {
        match self {
            Target::Model(model) => model.name(),
            Target::Agent(name) => name,
        }
    }
}

/// Returns the agent or the model that a path names. A model is named by one of the operator's aliases, by its name,
/// or by its name after a vendor (`@cf/vendor/model`).
fn target_of(gateway: &Gateway, path: &str) -> Result<Target, ApiError> {
    let models = gateway.host.models();
    let model_names = gateway.options.model_names.now();
    let name = model_names.get(path).map_or(path, String::as_str);
    if name.starts_with(AGENT_MODEL) {
        return Ok(Target::Agent(name.to_owned()));
    }
    if name == "default" {
        return Ok(Target::Model(models.find(None)?));
    }
    let bare = name.strip_prefix('@').and_then(|name| name.rsplit('/').next());
    if let Ok(model) = models.find(Some(bare.unwrap_or(name))) {
        return Ok(Target::Model(model));
    }
    let known: Vec<String> = models.served().iter().map(|model| model.name().to_owned()).collect();
    let message = format!(
        "model {:?} does not exist; the models are: {}; define an alias with `[ai.models]` in skep.toml",
        excerpt(path),
        known.join(", ")
    );
    Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message))
}

async fn native_whole(chat: StartedChat, is_json: bool) -> Result<Response, Failure> {
    let StartedChat { mut choices, .. } = chat;
    let outcome = choices.remove(0).outcome().await.map_err(ApiError::from)?;
    if outcome.cut_off {
        return Err(ApiError::from(EngineError::Truncated).into());
    }
    let result = native::result(&outcome.text, &outcome.tool_calls, &outcome.usage, is_json);
    Ok(Json(AiEnvelope::success(result)).into_response())
}

fn native_stream(chat: StartedChat) -> Response {
    let StartedChat { first, mut choices, .. } = chat;
    let events = stream::iter([Ok::<ChatEvent, EngineError>(first)]).chain(choices.remove(0));
    sse::respond(events, NativeWriter)
}
