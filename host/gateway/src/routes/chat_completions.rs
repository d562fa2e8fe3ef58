//! `/v1/chat/completions`: chat with a model, or with an agent as the model.

use crate::{
    ApiError, Gateway,
    body::{FieldsBody, FromFields, LONG, run_on_compute},
    caller::Caller,
    headers,
    metered::Metered,
    openai::{
        Envelope,
        chat_request::ChatBody,
        chat_response::{choice, completion, message},
        fields::Fields,
        logprobs, rest_of_reply,
    },
    routes::{agent_as_model, messages::run_events},
    spent::Spent,
    sse::{self, Message, Step, Writer},
};
use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, future::try_join_all, stream};
use skep_api::{
    AssistantMessage, ChatChoice, ChatChunk, ChatCompletion, ChatDelta, ChatLogprobs, ChunkChoice,
    ChunkFunction, ChunkToolCall, ErrorBody, marker,
};
use skep_engine::{
    Affinity, Cancel, EngineError, Model, Observer, TokenLogprob, Usage,
    chat::{ChatEvent, ChatMessage, ChatOptions, ChatStream, Routed},
};
use skep_runtime::{RunEvent, RuntimeError, ScoredToken, Surface, WorstCase};
use std::sync::Arc;
use utoipa::ToSchema;

/// An event of a streamed chat: a piece of the answer, or the error that breaks the stream off.
#[derive(ToSchema)]
#[schema(as = ChatStreamItem)]
#[serde(untagged)]
#[expect(dead_code, reason = "it only describes the answer")]
enum StreamItem {
    Piece(ChatChunk),
    Broken(ErrorBody),
}

/// Chats with a model or with an agent, as OpenAI's route of this name does.
///
/// `"model": "agent:NAME"` talks to an agent, which answers the last user message. The header `x-session-affinity` or
/// `x-session-id`, or the field `user`, names the agent's session. With a model, they or `prompt_cache_key` say where the prefix is
/// likely cached.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "models", operation_id = "create_chat_completion",
    params(
        ("x-session-affinity" = Option<String>, Header, description = "The session, whose prefix is likely cached"),
        ("x-session-id" = Option<String>, Header, description = "An alias of `x-session-affinity`"),
        ("idempotency-key" = Option<String>, Header,
            description = "With an agent: the same message under the same key is the same turn"),
    ),
    request_body = crate::openai::schema::ChatCompletionRequest,
    responses(
        (status = 200, description = "The answer; or with `stream`, its pieces as events without a name, and `[DONE]` after the last one. `x-skep-model` names the model that answers, `x-skep-attempts` how many a route asked, and `x-skep-ignored` the fields that changed nothing.",
            content((ChatCompletion = "application/json"), (StreamItem = "text/event-stream"))),
        (status = 404, description = "`model_not_found`"),
        (status = 409, description = "With an agent: `waiting_for_approval`, `model_gone`, `held_since_restore` or `turn_dropped`"),
        (status = 422, description = "`schema_unsatisfied`, `truncated`; with an agent: `invalid_message` or `tool_failed`"),
        (status = 499, description = "The turn of the agent was cancelled: `cancelled`."),
        (status = 502, description = "`upstream_refused`, `upstream_cut_off` or `upstream_malformed`"),
        (status = 503, description = "`upstream_unavailable`"),
        (status = 504, description = "`deadline_exceeded`"),
    ))]
pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    headers: HeaderMap,
    FieldsBody(body): FieldsBody<ChatBody>,
) -> Result<Response, ApiError> {
    let body = Arc::new(body);
    match body.parameters.model.as_deref().and_then(|model| model.strip_prefix("agent:")) {
        Some(agent) => {
            let response = with_agent(&gateway, caller, agent, &headers, &body).await?;
            Ok(headers::ignored(response, &body.ignored_by_agent()))
        }
        None => with_model(&gateway, &caller, &headers, &body).await,
    }
}

impl FromFields for ChatBody {
    fn read(fields: Fields) -> Result<Self, ApiError> {
        ChatBody::read(fields)
    }
}

/// Returns the requested model, or the default one, if the caller may use it. One that is not loaded is loaded first.
pub(super) async fn model_of(
    gateway: &Gateway,
    caller: &Caller,
    model: Option<&str>,
) -> Result<Model, ApiError> {
    let models = gateway.host.models();
    let model = models.find(named(model))?;
    caller.may_use(gateway, &model)?;
    Ok(models.ready(Some(model.name())).await?)
}

/// Returns the name of the model that was asked for, unless it is the default one.
pub(super) fn named(model: Option<&str>) -> Option<&str> {
    model.filter(|name| !name.is_empty() && *name != "default")
}

async fn with_model(
    gateway: &Gateway,
    caller: &Caller,
    headers: &HeaderMap,
    body: &Arc<ChatBody>,
) -> Result<Response, ApiError> {
    let asked = named(body.parameters.model.as_deref());
    let model = model_of(gateway, caller, asked).await?;
    let observer = caller.observer(gateway, Surface::ChatCompletions, asked, body.parameters.streams());
    let affinity = headers::affinity_with(headers, caller, body.parameters.cache_key())?;
    let chat = StartedChat::start(gateway, caller, (model, observer), affinity, body).await?;
    let (warnings, served, ignored) = (chat.warnings.clone(), chat.served(), body.ignored_by(&chat.model));
    let response = match body.parameters.streams() {
        true => chat.stream(body.parameters.streams_usage()),
        false => Json(chat.whole().await?).into_response(),
    };
    let response = headers::ignored(headers::warned(response, &warnings), &ignored);
    Ok(headers::served(response, &served))
}

/// A chat that was asked for.
pub(super) struct Asked {
    pub messages: Vec<ChatMessage>,
    /// The options of each choice, of which there is at least one.
    pub choices: Vec<ChatOptions>,
    /// The field that specifies the form of the response.
    pub form_field: Option<&'static str>,
}

/// A completion that was admitted. Invalid requests, and those for which there is no room, have been refused before.
pub(super) struct StartedChat {
    pub model: Model,
    /// The first event of choice 0.
    pub first: ChatEvent,
    pub choices: Vec<Metered<ChatStream>>,
    wants_logprobs: bool,
    /// Likely mistakes in the request's schemas.
    pub warnings: Arc<[String]>,
}

impl StartedChat {
    pub(super) async fn start(
        gateway: &Gateway,
        caller: &Caller,
        (model, observer): (Model, Option<Arc<dyn Observer>>),
        affinity: Affinity,
        body: &Arc<ChatBody>,
    ) -> Result<StartedChat, ApiError> {
        let bytes = if body.is_constrained() { LONG } else { body.text_bytes() };
        let body = body.clone();
        let asked = move |model: &Model| {
            let choices = (0..body.parameters.choices()?)
                .map(|choice| body.options(choice, &affinity, &model.sampling()))
                .collect::<Result<_, ApiError>>()?;
            Ok(Asked { messages: body.messages()?, choices, form_field: body.form_field() })
        };
        StartedChat::begin(gateway, caller, (model, observer), bytes, asked).await
    }

    /// Starts a chat. `asked` reads the request, which takes about as long as its `bytes` do.
    pub(super) async fn begin(
        gateway: &Gateway,
        caller: &Caller,
        (model, observer): (Model, Option<Arc<dyn Observer>>),
        bytes: usize,
        asked: impl FnOnce(&Model) -> Result<Asked, ApiError> + Send + 'static,
    ) -> Result<StartedChat, ApiError> {
        let (tenant, spent) = (caller.tenant.as_str(), caller.spent().clone());
        let budget = gateway.host.tenant_budget(tenant, caller.key())?;
        let started = model.clone();
        let begin = move |cancel: &Cancel| {
            let Asked { messages, choices, form_field } = asked(&started)?;
            let wants_logprobs = choices[0].top_logprobs.is_some();
            let chats = choices.into_iter().map(|options| {
                let worst = WorstCase::of_chat(&started, &messages, &options);
                let tokens = budget.meter(&started, worst)?;
                let options = ChatOptions { cancel: cancel.clone(), observer: observer.clone(), ..options };
                let stream = started.chat(&messages, options);
                let stream = stream.map_err(|error| ApiError::of_request(error, form_field))?;
                Ok(Metered::of_chat(stream, tokens, spent.clone()))
            });
            Ok((chats.collect::<Result<Vec<_>, ApiError>>()?, wants_logprobs))
        };
        let (mut choices, wants_logprobs) = run_on_compute(gateway, tenant, bytes, begin).await?;
        let warnings = choices[0].stream().warnings();
        // A refusal is a status, not an event, so the first event is awaited before the response starts.
        let first = choices[0].next().await.unwrap_or(Err(EngineError::Cancelled))?;
        Ok(StartedChat { model, first, choices, wants_logprobs, warnings })
    }

    /// Returns the model that answers, which a route may have chosen.
    pub(super) fn served(&self) -> Routed {
        match &self.first {
            ChatEvent::Routed(routed) => routed.clone(),
            _ => Routed { model: self.model.name().to_owned(), attempts: 1 },
        }
    }

    /// Returns the events of the only choice.
    pub(super) fn events(self) -> impl Stream<Item = Result<ChatEvent, EngineError>> + Send + Unpin {
        stream::iter([Ok(self.first)]).chain(stream::select_all(self.choices))
    }

    /// Returns a streamed response of the only choice.
    pub(super) fn respond_with<W>(self, writer: W) -> Response
    where
        W: Writer<Item = Result<ChatEvent, EngineError>>,
    {
        sse::respond(self.events(), writer)
    }

    /// Returns a streamed response.
    pub(super) fn stream(self, sends_usage: bool) -> Response {
        let rest = self.choices.into_iter().enumerate();
        let rest = rest.map(|(index, stream)| stream.map(move |event| (index, event)));
        let events = stream::iter([(0, Ok(self.first))]).chain(stream::select_all(rest));
        let writer = ChunkWriter {
            envelope: Envelope::new("chatcmpl", self.model.name()),
            model: self.model,
            usage: Usage::default(),
            sends_usage,
        };
        sse::respond(events, writer)
    }

    /// Returns the whole response.
    pub(super) async fn whole(self) -> Result<ChatCompletion, ApiError> {
        let served = self.served().model;
        let StartedChat { model, choices, wants_logprobs, .. } = self;
        let choices = choices.into_iter().enumerate();
        let choices = choices.map(|(index, stream)| whole_choice(&model, index, stream, wants_logprobs));
        let (choices, usage) = all_choices(choices).await?;
        Ok(completion(&served, choices, &usage))
    }
}

/// Waits for all choices of an answer, and returns them with their usage together.
pub(super) async fn all_choices<C>(
    choices: impl Iterator<Item = impl Future<Output = Result<(C, Usage), ApiError>>>,
) -> Result<(Vec<C>, Usage), ApiError> {
    // The answer of another server continues only while it is polled.
    let choices = try_join_all(choices).await?;
    let mut total = Usage::default();
    let choices = choices.into_iter().map(|(choice, usage)| {
        total.add(&usage);
        choice
    });
    Ok((choices.collect(), total))
}

async fn whole_choice(
    model: &Model,
    index: usize,
    mut stream: Metered<ChatStream>,
    wants_logprobs: bool,
) -> Result<(ChatChoice, Usage), ApiError> {
    let mut scored = Vec::new();
    while let Some(event) = stream.next().await {
        match event? {
            ChatEvent::Text { logprobs, .. } => scored.extend(entries(model, &logprobs)),
            ChatEvent::Finished(outcome) => {
                let logprobs = wants_logprobs.then_some(ChatLogprobs { content: scored });
                let message = message(&outcome.text, &outcome.reasoning, &outcome.tool_calls);
                return Ok((choice(index, message, outcome.finish, logprobs), outcome.usage));
            }
            _ => {}
        }
    }
    Err(EngineError::Cancelled.into())
}

pub(super) fn entries(model: &Model, logprobs: &[TokenLogprob]) -> Vec<skep_api::TokenLogprob> {
    // Log-probabilities are not requested from upstream servers.
    let Some(engine) = model.engine() else { return Vec::new() };
    let scored = |token: &TokenLogprob| ScoredToken::of(engine, token.id, Some(token));
    logprobs.iter().map(|token| logprobs::chat_entry(&scored(token))).collect()
}

struct ChunkWriter {
    model: Model,
    envelope: Envelope,
    usage: Usage,
    sends_usage: bool,
}

impl ChunkWriter {
    fn chunk(&self, index: usize, delta: ChatDelta) -> ChatChunk {
        self.envelope.chunk(piece(index, delta))
    }
}

fn piece(index: usize, delta: ChatDelta) -> ChunkChoice {
    ChunkChoice { index: index as u32, delta, finish_reason: None, logprobs: None }
}

/// Returns the delta that begins a message.
fn beginning() -> ChatDelta {
    ChatDelta { role: Some(marker::Assistant), content: Some(String::new()), ..ChatDelta::default() }
}

fn text(delta: String) -> ChatDelta {
    ChatDelta { content: Some(delta), ..ChatDelta::default() }
}

fn reasoning(delta: String) -> ChatDelta {
    ChatDelta { reasoning_content: Some(delta.clone()), reasoning: Some(delta), ..ChatDelta::default() }
}

fn part_of_call(call: ChunkToolCall) -> ChatDelta {
    ChatDelta { tool_calls: vec![call], ..ChatDelta::default() }
}

impl Writer for ChunkWriter {
    type Item = (usize, Result<ChatEvent, EngineError>);

    fn write(&mut self, (index, event): Self::Item) -> Step {
        let event = match event {
            Ok(event) => event,
            Err(error) => return Step::Break(vec![Message::data(&ApiError::from(error).body())]),
        };
        let chunk = match event {
            ChatEvent::Routed(routed) => {
                self.envelope.set_model(routed.model);
                return Step::Go(Vec::new());
            }
            ChatEvent::Started { .. } => self.chunk(index, beginning()),
            ChatEvent::Reasoning { delta } => self.chunk(index, reasoning(delta)),
            ChatEvent::Text { delta, logprobs } => {
                let content = entries(&self.model, &logprobs);
                let logprobs = (!content.is_empty()).then_some(ChatLogprobs { content });
                self.envelope.chunk(ChunkChoice { logprobs, ..piece(index, text(delta)) })
            }
            ChatEvent::ToolCallStarted { index: call, id, name } => {
                let function = ChunkFunction { name: Some(name), arguments: String::new() };
                let (id, kind) = (Some(id), Some(marker::Function));
                self.chunk(index, part_of_call(ChunkToolCall { index: call as u32, id, kind, function }))
            }
            ChatEvent::ToolCallArguments { index: call, delta } => {
                let function = ChunkFunction { name: None, arguments: delta };
                let call = ChunkToolCall { index: call as u32, id: None, kind: None, function };
                self.chunk(index, part_of_call(call))
            }
            ChatEvent::ToolCallFinished { .. } => return Step::Go(Vec::new()),
            ChatEvent::Finished(outcome) => {
                self.usage.add(&outcome.usage);
                let finish_reason = Some(outcome.finish.as_str().to_owned());
                self.envelope.chunk(ChunkChoice { finish_reason, ..piece(index, ChatDelta::default()) })
            }
        };
        Step::Go(vec![Message::data(&chunk)])
    }

    fn end(&mut self) -> Vec<Message> {
        let usage = self.sends_usage.then(|| Message::data(&self.envelope.last_chunk(&self.usage)));
        usage.into_iter().chain([Message::done()]).collect()
    }
}

/// Lets an agent answer the last user message. The session header or `user` names its session.
async fn with_agent(
    gateway: &Gateway,
    caller: Caller,
    agent: &str,
    headers: &HeaderMap,
    body: &Arc<ChatBody>,
) -> Result<Response, ApiError> {
    caller.may_reach(agent)?;
    body.refuse_for_agent()?;
    let asked = body.clone();
    let take = move |_: &Cancel| asked.last_user_text();
    let text = run_on_compute(gateway, caller.tenant.as_str(), body.text_bytes(), take).await?;
    if text.is_empty() {
        return Err(ApiError::parameter(
            "messages",
            "the last user message is empty; an agent requires text",
        ));
    }
    let spent = caller.spent().clone();
    let session = agent_as_model::session(&caller, headers, body.parameters.user.as_ref())?;
    let run = agent_as_model::invoke(gateway, &caller, headers, (agent, session), text, false).await?;
    let model = format!("agent:{agent}");
    let mut events = run_events(run).boxed();
    if body.parameters.streams() {
        let first = match events.next().await {
            Some(Err(error)) => return Err(error.into()),
            first => first,
        };
        let writer = AgentChunkWriter {
            envelope: Envelope::new("chatcmpl", &model),
            usage: Usage::default(),
            sends_usage: body.parameters.streams_usage(),
            said: String::new(),
            settled: 0,
            spent,
        };
        return Ok(sse::respond(stream::iter(first).chain(events), writer));
    }
    while let Some(event) = events.next().await {
        if let RunEvent::Done(outcome) = event? {
            spent.add(&outcome.usage);
            let message = AssistantMessage {
                role: marker::Assistant,
                content: Some(outcome.text),
                reasoning_content: None,
                reasoning: None,
                tool_calls: Vec::new(),
            };
            let choice = ChatChoice { index: 0, message, finish_reason: "stop".to_owned(), logprobs: None };
            let answer = Envelope::new("chatcmpl", &model).chat(vec![choice], &outcome.usage);
            return Ok(Json(answer).into_response());
        }
    }
    Err(RuntimeError::Cancelled.into())
}

struct AgentChunkWriter {
    envelope: Envelope,
    usage: Usage,
    sends_usage: bool,
    /// The text that has been streamed.
    said: String,
    /// The number of bytes of it that come from generations that have ended.
    settled: usize,
    spent: Spent,
}

impl AgentChunkWriter {
    fn chunk(&self, delta: ChatDelta, finish: Option<&str>) -> Message {
        let finish_reason = finish.map(str::to_owned);
        Message::data(&self.envelope.chunk(ChunkChoice { finish_reason, ..piece(0, delta) }))
    }
}

/// Returns the error of a stream whose text is void. Its format cannot say that the text begins again.
fn taken_back() -> ApiError {
    let message = "the answer was cut off after a part of it was sent, which a stream of chat completions cannot take \
                   back; send the message without `stream`, or to /v1/responses or the agent's own route, whose streams can";
    ApiError::new(StatusCode::BAD_GATEWAY, "upstream_cut_off", message)
}

impl Writer for AgentChunkWriter {
    type Item = Result<RunEvent, RuntimeError>;

    fn write(&mut self, event: Self::Item) -> Step {
        Step::Go(match event {
            Ok(RunEvent::Started { .. }) => {
                vec![self.chunk(beginning(), None)]
            }
            Ok(RunEvent::Delta { text: delta }) => {
                self.said.push_str(&delta);
                vec![self.chunk(text(delta), None)]
            }
            Ok(RunEvent::Generation { .. }) => {
                self.settled = self.said.len();
                Vec::new()
            }
            Ok(RunEvent::GenerationRestarted) if self.said.len() > self.settled => {
                return Step::Break(vec![Message::data(&taken_back().body())]);
            }
            Ok(RunEvent::Done(outcome)) => {
                self.spent.add(&outcome.usage);
                self.usage = outcome.usage;
                let rest = rest_of_reply(&self.said, &outcome.text).unwrap_or(&outcome.text);
                let rest = (!rest.is_empty()).then(|| self.chunk(text(rest.to_owned()), None));
                rest.into_iter().chain([self.chunk(ChatDelta::default(), Some("stop"))]).collect()
            }
            Ok(_) => Vec::new(),
            Err(error) => return Step::Break(vec![Message::data(&ApiError::from(error).body())]),
        })
    }

    fn end(&mut self) -> Vec<Message> {
        let usage = self.sends_usage.then(|| Message::data(&self.envelope.last_chunk(&self.usage)));
        usage.into_iter().chain([Message::done()]).collect()
    }
}
