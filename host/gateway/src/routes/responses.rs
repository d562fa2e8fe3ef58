//! `/v1/responses`: responses of a model, or of an agent as the model, as OpenAI's Responses API has them.

use super::{
    agent_as_model,
    chat_completions::{Asked, StartedChat, entries, model_of, named},
    messages::run_events,
    stored_responses,
};
use crate::{
    ApiError, Gateway,
    body::{FieldsBody, FromFields, LONG, run_on_compute},
    caller::Caller,
    headers,
    openai::{
        fields::Fields,
        now_s,
        responses::{
            InputItem,
            request::{FORM_FIELD, ResponseRequest},
            stored::{self, StoredRequest, without_output},
            writer::{AgentWriter, Events, ModelWriter},
        },
        schema::CreateResponseRequest,
    },
    sse,
};
use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, future, stream};
use skep_api::NumberedResponseEvent;
use skep_engine::{
    Affinity, Cancel, Model,
    chat::{ChatEvent, ChatOptions},
};
use skep_runtime::{
    AGENT_MODEL, BatchAnswer, BatchItem, BatchRequest, BatchTerms, NewBatch, NewResponse, ResponseTurn,
    RunEvent, RuntimeError, StoredResponse, Surface, response_id,
};
use std::{collections::HashMap, sync::Arc};
use tracing::Instrument as _;

/// The form of the answers of responses in the background, as batches store it.
const FORM: &str = "response";

/// Creates a response of a model or of an agent, as OpenAI's route of this name does.
///
/// `"model": "agent:NAME"` talks to an agent, which answers the last message of the user; `previous_response_id` continues
/// its session. `background: true` returns at once; the response is durable, and survives a restart of the host.
#[utoipa::path(post, path = "/v1/responses", tag = "responses", operation_id = "create_response",
    params(
        ("x-session-affinity" = Option<String>, Header, description = "The session, whose prefix is likely cached; with an agent, its session"),
        ("x-session-id" = Option<String>, Header, description = "An alias of `x-session-affinity`"),
        ("idempotency-key" = Option<String>, Header,
            description = "With an agent: the same message under the same key is the same turn"),
    ),
    request_body = CreateResponseRequest,
    responses(
        (status = 200, description = "The response; or with `stream`, its events. `x-skep-ignored` names the fields that the host does not know.",
            content((skep_api::Response = "application/json"), (NumberedResponseEvent = "text/event-stream"))),
        (status = 400, description = "`response_chain_too_long`, or an invalid field"),
        (status = 404, description = "`model_not_found`, `response_not_found` or `item_not_found`"),
        (status = 422, description = "`schema_unsatisfied` or `truncated`"),
        (status = 409, description = "`responses_full`: the stored responses take up their space. Retries fail until some are deleted"),
        (status = 429, description = "`queue_full`, `busy`, or a budget is used up"),
        (status = 502, description = "`upstream_refused`, `upstream_cut_off` or `upstream_malformed`"),
        (status = 503, description = "`upstream_unavailable` or `model_loading`"),
        (status = 504, description = "`deadline_exceeded`"),
    ))]
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    headers: HeaderMap,
    FieldsBody(request): FieldsBody<ResponseRequest>,
) -> Result<Response, ApiError> {
    let chain = match &request.previous {
        Some(previous) => stored_responses::chain_of_caller(&gateway, &caller, previous).await?,
        None => Vec::new(),
    };
    let id = response_id();
    let mut input = request.input.items()?;
    let mut referred = HashMap::new();
    for response in stored::referred(&input)? {
        // A response that is gone is reported with the item that refers to it.
        match stored_responses::of_caller(&gateway, &caller, &response).await {
            Err(error) if error.status == StatusCode::NOT_FOUND => {}
            found => drop(referred.insert(response, found?)),
        }
    }
    stored::resolve(&mut input, &referred)?;
    let thread = chain.first().map_or_else(|| id.clone(), |first| first.thread.clone());
    let pending = PendingResponse { id, thread, chain, input, request, gateway, caller };
    let model = pending.request.parameters.model.clone();
    match model.as_deref().and_then(|model| model.strip_prefix(AGENT_MODEL)) {
        Some(agent) => {
            let ignored = pending.request.ignored.clone();
            Ok(headers::ignored(pending.with_agent(agent, &headers).await?, &ignored))
        }
        None => {
            let model = model_of(&pending.gateway, &pending.caller, named(model.as_deref())).await?;
            let ignored = pending.request.ignored_by(&model);
            Ok(headers::ignored(pending.with_model(model, &headers).await?, &ignored))
        }
    }
}

impl FromFields for ResponseRequest {
    fn read(fields: Fields) -> Result<Self, ApiError> {
        ResponseRequest::read(fields)
    }
}

/// A response that was asked for.
struct PendingResponse {
    id: String,
    /// The name that all responses of a chain share, by which their cached prefix is found.
    thread: String,
    /// The responses that this one continues.
    chain: Vec<StoredResponse>,
    input: Vec<InputItem>,
    request: ResponseRequest,
    gateway: Gateway,
    caller: Caller,
}

/// Stores a response when it ends, before its client learns of the end.
#[derive(Clone)]
struct ResponseRecorder {
    gateway: Gateway,
    /// `None` if the response is not stored.
    new: Option<NewResponse>,
}

impl ResponseRecorder {
    /// Stores the response with its answer, which is made only if it is stored.
    async fn keep(&self, answer: impl FnOnce() -> BatchAnswer) -> Result<(), ApiError> {
        match &self.new {
            Some(new) => Ok(self.gateway.host.keep_response(new.clone(), Some(&answer())).await?),
            None => Ok(()),
        }
    }
}

impl PendingResponse {
    /// Returns the response before it has any output.
    fn response(&self, stored: &StoredRequest) -> skep_api::Response {
        without_output(&self.id, self.request.previous.as_deref(), stored, now_s())
    }

    fn new_response(&self, stored: &StoredRequest, turn: Option<ResponseTurn>) -> NewResponse {
        NewResponse {
            id: self.id.clone(),
            principal: self.caller.tenant.to_string(),
            previous: self.request.previous.clone(),
            thread: self.thread.clone(),
            turn,
            request: stored.encode(),
        }
    }

    fn recorder(&self, stored: &StoredRequest, turn: Option<ResponseTurn>) -> ResponseRecorder {
        let new = self.request.is_stored.then(|| self.new_response(stored, turn));
        ResponseRecorder { gateway: self.gateway.clone(), new }
    }

    fn affinity(&self, headers: &HeaderMap) -> Result<Affinity, ApiError> {
        let named = self.request.parameters.cache_key().unwrap_or(&self.thread);
        headers::affinity_with(headers, &self.caller, Some(named))
    }

    async fn with_model(self, model: Model, headers: &HeaderMap) -> Result<Response, ApiError> {
        let (gateway, caller) = (self.gateway.clone(), self.caller.clone());
        let asked = named(self.request.parameters.model.as_deref());
        let streams = self.request.parameters.streams();
        let affinity = self.affinity(headers)?;
        let bytes = if self.request.begins_slowly() || !self.chain.is_empty() {
            LONG
        } else {
            self.request.text_bytes()
        };
        if self.request.is_background {
            return self.queue(model, affinity, bytes, streams).await;
        }
        let observer = caller.observer(&gateway, Surface::Responses, asked, streams);
        let pending = Arc::new(self);
        let read = pending.clone();
        let asked = move |model: &Model| {
            let options = read.request.options(affinity, &model.sampling())?;
            Ok(Asked {
                messages: read.messages(model)?,
                choices: vec![options],
                form_field: Some(FORM_FIELD),
            })
        };
        let mut chat = StartedChat::begin(&gateway, &caller, (model.clone(), observer), bytes, asked).await?;
        let (warnings, served) = (chat.warnings.clone(), chat.served());
        let stored = pending.stored(&served.model, &model)?;
        let recorder = pending.recorder(&stored, None);
        let events = Events::new(pending.response(&stored), None, stored.carries_reasoning);
        let response = if streams {
            let kept = chat.events().then(move |event| {
                let recorder = recorder.clone();
                async move {
                    let event = event.map_err(ApiError::from)?;
                    if let ChatEvent::Finished(outcome) = &event {
                        recorder.keep(|| BatchAnswer::of_chat(FORM.to_owned(), outcome)).await?;
                    }
                    Ok(event)
                }
            });
            let score = move |tokens: &[skep_engine::TokenLogprob]| entries(&model, tokens);
            sse::respond(kept.boxed(), ModelWriter { events, score })
        } else {
            let mut events = events;
            let first = stream::iter([Ok(chat.first)]);
            let mut chat = first.chain(chat.choices.remove(0));
            loop {
                let event = chat.next().await.unwrap_or(Err(skep_engine::EngineError::Cancelled));
                let event = event.map_err(stored::failure)?;
                if let ChatEvent::Finished(outcome) = &event {
                    recorder.keep(|| BatchAnswer::of_chat(FORM.to_owned(), outcome)).await?;
                    events.of_chat(event, |tokens| entries(&model, tokens));
                    break Json(events.into_response()).into_response();
                }
                events.of_chat(event, |tokens| entries(&model, tokens));
            }
        };
        let response = headers::warned(response, &warnings);
        Ok(headers::served(response, &served))
    }

    /// Queues the request of a response in the background.
    async fn queue(
        self,
        model: Model,
        affinity: Affinity,
        bytes: usize,
        streams: bool,
    ) -> Result<Response, ApiError> {
        let (gateway, id) = (self.gateway.clone(), self.id.clone());
        let stored = self.stored(model.name(), &model)?;
        let new = self.new_response(&stored, None);
        let (principal, key) = (self.caller.tenant.to_string(), self.caller.key().map(str::to_owned));
        let name = model.name().to_owned();
        let read = move |_: &Cancel| {
            let options = self.request.options(affinity, &model.sampling())?;
            if options.top_logprobs.is_some() {
                let message = "log-probabilities are not supported in the background";
                return Err(ApiError::parameter("top_logprobs", message));
            }
            // A request that is run again, because the host stopped, gives the same answer.
            let seed = options.seed.or_else(|| Some(random_seed(&self.id)));
            Ok((self.messages(&model)?, Box::new(ChatOptions { seed, ..options })))
        };
        let (messages, options) = run_on_compute(&gateway, &principal, bytes, read).await?;
        let request = BatchRequest::Chat { messages, options, choices: 1 };
        let items = vec![BatchItem { request, form: FORM.to_owned(), reference: None, keep: None }];
        let terms = BatchTerms::default();
        let batch = NewBatch { principal: principal.clone(), key, model: name, items, terms };
        gateway.host.queue_response(new, batch).await?;
        let response = gateway.host.response(&principal, &id).await?;
        if streams {
            return stored_responses::follow(&gateway, &principal, response, None).await;
        }
        Ok(Json(stored::shown(&response)?).into_response())
    }

    fn messages(&self, model: &Model) -> Result<Vec<skep_engine::chat::ChatMessage>, ApiError> {
        stored::messages(self.request.instructions.as_deref(), &self.chain, &self.input, model.name())
    }

    /// Returns what is stored of the request. `served` is the model that answers.
    fn stored(&self, served: &str, model: &Model) -> Result<StoredRequest, ApiError> {
        let sampling = self.request.parameters.sampling(&model.sampling())?;
        Ok(StoredRequest {
            model: served.to_owned(),
            is_background: self.request.is_background,
            settings: self.request.settings(Some(&sampling)),
            caller: self.request.caller.clone(),
            input: self.input.clone(),
            carries_reasoning: self.request.reasoning.is_carried,
        })
    }

    /// Lets an agent answer the last message of the user, in the session of the response that is continued.
    async fn with_agent(self, agent: &str, headers: &HeaderMap) -> Result<Response, ApiError> {
        let (gateway, caller) = (&self.gateway, &self.caller);
        caller.may_reach(agent)?;
        self.request.refuse_for_agent()?;
        let model = format!("{AGENT_MODEL}{agent}");
        let session = match self.chain.last().map(|last| &last.turn) {
            Some(Some(turn)) if turn.agent == agent => turn.session.clone(),
            Some(_) => {
                let message =
                    format!("the response does not belong to {model}, so this agent cannot continue it");
                return Err(ApiError::parameter("previous_response_id", message));
            }
            None => agent_as_model::session(caller, headers, self.request.caller.user.as_ref())?,
        };
        let stored = StoredRequest {
            model: model.clone(),
            is_background: self.request.is_background,
            settings: self.request.settings(None),
            caller: self.request.caller.clone(),
            input: self.input.clone(),
            carries_reasoning: self.request.reasoning.is_carried,
        };
        let (text, at) = (stored::text_for_agent(&self.input)?, (agent, session.clone()));
        if self.request.is_background {
            let new = self.new_response(&stored, None);
            self.begin_turn(headers, at, text, new).await?;
            let (principal, id) = (caller.tenant.as_str(), &self.id);
            let response = gateway.host.response(principal, id).await?;
            if self.request.parameters.streams() {
                return stored_responses::follow(gateway, principal, response, None).await;
            }
            return Ok(Json(stored::shown(&response)?).into_response());
        }
        let mut run = agent_as_model::invoke(gateway, caller, headers, at, text, false).await?;
        let turn = ResponseTurn { agent: agent.to_owned(), session, turn: run.turn_id().to_owned() };
        let recorder = self.recorder(&stored, Some(turn));
        let events = Events::new(self.response(&stored), None, stored.carries_reasoning);
        let mut writer = AgentWriter::new(events);
        let spent = caller.spent().clone();
        // A refusal is a status, not an event, so the first event is awaited before the response starts.
        let first = match run.next().await {
            Some(Err(error)) => return Err(error.into()),
            first => first,
        };
        let events = stream::iter(first).chain(run_events(run).boxed());
        let mut events = events
            .then(move |event| {
                let (recorder, spent) = (recorder.clone(), spent.clone());
                async move {
                    let event = event.map_err(ApiError::from)?;
                    if let RunEvent::Done(outcome) = &event {
                        spent.add(&outcome.usage);
                        recorder.keep(|| BatchAnswer::of_turn(FORM.to_owned(), outcome.clone())).await?;
                    }
                    Ok(event)
                }
            })
            .boxed();
        if self.request.parameters.streams() {
            return Ok(sse::respond(events, writer));
        }
        while let Some(event) = events.next().await {
            let event = event?;
            let is_last = matches!(event, RunEvent::Done(_));
            sse::Writer::write(&mut writer, Ok(event));
            if is_last {
                return Ok(Json(writer.events.into_response()).into_response());
            }
        }
        future::ready(Err(RuntimeError::Cancelled.into())).await
    }
}

impl PendingResponse {
    /// Begins the turn of a response in the background and stores the response. A turn whose response cannot be stored is
    /// cancelled, because a client that sends the request again begins another turn.
    async fn begin_turn(
        &self,
        headers: &HeaderMap,
        (agent, session): (&str, String),
        text: String,
        new: NewResponse,
    ) -> Result<(), ApiError> {
        let (gateway, caller, headers) = (self.gateway.clone(), self.caller.clone(), headers.clone());
        gateway.host.check_response_room(&new).await?;
        let agent = agent.to_owned();
        let begin = async move {
            let at = (agent.as_str(), session.clone());
            let run = agent_as_model::invoke(&gateway, &caller, &headers, at, text, true).await?;
            let turn = ResponseTurn { agent, session, turn: run.turn_id().to_owned() };
            let new = NewResponse { turn: Some(turn.clone()), ..new };
            let Err(error) = gateway.host.keep_response(new, None).await else { return Ok(()) };
            // The same message under the same key finds this turn again, so that it is not begun twice.
            if headers::idempotency_key(&headers)?.is_none() {
                // This needs no store, which may be away.
                run.cancel();
                let ResponseTurn { agent, session, turn } = turn;
                if let Err(error) = gateway.host.cancel_turn(&agent, &session, &turn).await {
                    tracing::warn!(agent, turn, "cannot cancel a turn whose response is not stored: {error}");
                }
            }
            Err(ApiError::from(error))
        };
        // The client may be gone when the turn has begun and its response is not stored yet.
        let begun = tokio::spawn(begin.in_current_span()).await;
        begun.unwrap_or_else(|error| {
            let message = format!("a response could not be begun: {error}");
            Err(RuntimeError::Internal { message }.into())
        })
    }
}

/// Returns a seed that only this response has.
fn random_seed(id: &str) -> u64 {
    let digits = id.get(id.len().saturating_sub(15)..).unwrap_or_default();
    u64::from_str_radix(digits, 16).unwrap_or(0)
}
