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
        chat_response::{choice, completion, finish_reason},
        fields::Fields,
        logprobs, usage_json,
    },
    routes::messages::run_events,
    spent::Spent,
    sse::{self, Message, Step, Writer},
};
use axum::{
    Json,
    extract::State,
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use skep_engine::{
    Affinity, Cancel, Engine, EngineError, Priority, TokenLogprob, Usage,
    chat::{ChatEvent, ChatOptions, ChatStream, chat},
};
use skep_runtime::{Invocation, Origin, RunEvent, RuntimeError};
use std::sync::Arc;

pub(crate) async fn create(
    State(gateway): State<Gateway>,
    caller: Caller,
    headers: HeaderMap,
    FieldsBody(body): FieldsBody<ChatBody>,
) -> Result<Response, ApiError> {
    let body = Arc::new(body);
    match body.parameters.model.as_deref().and_then(|model| model.strip_prefix("agent:")) {
        Some(agent) => with_agent(&gateway, caller, agent, &headers, &body).await,
        None => with_model(&gateway, &caller, &headers, &body).await,
    }
}

impl FromFields for ChatBody {
    fn read(fields: Fields) -> Result<Self, ApiError> {
        ChatBody::read(fields)
    }
}

/// Returns the engine of the requested model, or the default one.
pub(super) fn engine_of(gateway: &Gateway, model: Option<&str>) -> Result<Engine, ApiError> {
    let name = model.filter(|name| !name.is_empty() && *name != "default");
    Ok(gateway.host.models().get(name)?)
}

async fn with_model(
    gateway: &Gateway,
    caller: &Caller,
    headers: &HeaderMap,
    body: &Arc<ChatBody>,
) -> Result<Response, ApiError> {
    caller.may_reach_models()?;
    let engine = engine_of(gateway, body.parameters.model.as_deref())?;
    let chat = StartedChat::start(gateway, caller, engine, headers::affinity(headers, caller)?, body).await?;
    let warnings = chat.warnings.clone();
    let response = match body.parameters.streams() {
        true => chat.stream(body.parameters.streams_usage()),
        false => Json(chat.whole().await?).into_response(),
    };
    Ok(headers::warned(response, &warnings))
}

/// A completion that was admitted. Invalid requests, and those for which there is no room, have been refused before.
pub(super) struct StartedChat {
    pub engine: Engine,
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
        engine: Engine,
        affinity: Affinity,
        body: &Arc<ChatBody>,
    ) -> Result<StartedChat, ApiError> {
        let (tenant, spent) = (caller.tenant.as_str(), caller.spent());
        let budget = gateway.host.tenant_budget(tenant)?;
        let bytes = if body.is_constrained() { LONG } else { body.text_bytes() };
        let (started, asked) = (engine.clone(), body.clone());
        let begin = move |cancel: &Cancel| {
            let messages = asked.messages()?;
            let options = (0..asked.parameters.choices()?).map(|choice| asked.options(choice, &affinity));
            let options = options.collect::<Result<Vec<ChatOptions>, ApiError>>()?;
            let wants_logprobs = options[0].top_logprobs.is_some();
            let chats = options.into_iter().map(|options| {
                let options = ChatOptions { cancel: cancel.clone(), ..options };
                chat(&started, &messages, options)
            });
            let chats = chats.collect::<Result<Vec<ChatStream>, EngineError>>();
            let chats = chats.map_err(|error| ApiError::of_request(error, asked.form_field()))?;
            Ok((chats, wants_logprobs))
        };
        let (choices, wants_logprobs) = run_on_compute(gateway, tenant, bytes, begin).await?;
        let warnings = choices[0].warnings().clone();
        let metered = choices.into_iter().map(|stream| Metered::new(stream, budget.meter(), spent.clone()));
        let mut choices: Vec<_> = metered.collect();
        // A refusal is a status, not an event, so the first event is awaited before the response starts.
        let first = choices[0].next().await.unwrap_or(Err(EngineError::Cancelled))?;
        Ok(StartedChat { engine, first, choices, wants_logprobs, warnings })
    }

    /// Returns a streamed response.
    pub(super) fn stream(self, sends_usage: bool) -> Response {
        let model = self.engine.info().name.clone();
        let rest = self.choices.into_iter().enumerate();
        let rest = rest.map(|(index, stream)| stream.map(move |event| (index, event)));
        let events = stream::iter([(0, Ok(self.first))]).chain(stream::select_all(rest));
        let writer = ChunkWriter {
            engine: self.engine,
            envelope: Envelope::new("chatcmpl", "chat.completion.chunk", &model),
            usage: Usage::default(),
            sends_usage,
        };
        sse::respond(events, writer)
    }

    /// Returns the whole response.
    pub(super) async fn whole(self) -> Result<Value, ApiError> {
        let StartedChat { engine, choices, wants_logprobs, .. } = self;
        let mut usage = Usage::default();
        let mut answers = Vec::new();
        for (index, stream) in choices.into_iter().enumerate() {
            answers.push(whole_choice(&engine, index, stream, wants_logprobs, &mut usage).await?);
        }
        Ok(completion(&engine.info().name, answers, &usage))
    }
}

async fn whole_choice(
    engine: &Engine,
    index: usize,
    mut stream: Metered<ChatStream>,
    wants_logprobs: bool,
    usage: &mut Usage,
) -> Result<Value, ApiError> {
    let mut scored: Vec<Value> = Vec::new();
    while let Some(event) = stream.next().await {
        match event? {
            ChatEvent::Text { logprobs, .. } => scored.extend(entries(engine, &logprobs)),
            ChatEvent::Finished(outcome) => {
                usage.add(&outcome.usage);
                let logprobs = if wants_logprobs { json!({"content": scored}) } else { Value::Null };
                return Ok(choice(index, &outcome.text, &outcome.tool_calls, outcome.finish, logprobs));
            }
            _ => {}
        }
    }
    Err(EngineError::Cancelled.into())
}

fn entries(engine: &Engine, logprobs: &[TokenLogprob]) -> Vec<Value> {
    logprobs.iter().map(|token| logprobs::chat_entry(engine, token)).collect()
}

struct ChunkWriter {
    engine: Engine,
    envelope: Envelope,
    usage: Usage,
    sends_usage: bool,
}

impl ChunkWriter {
    fn chunk(&self, index: usize, delta: Value, finish: Option<&str>) -> Value {
        self.envelope.with_choices(vec![json!({"index": index, "delta": delta, "finish_reason": finish})])
    }
}

impl Writer for ChunkWriter {
    type Item = (usize, Result<ChatEvent, EngineError>);

    fn write(&mut self, (index, event): Self::Item) -> Step {
        let event = match event {
            Ok(event) => event,
            Err(error) => return Step::Break(vec![Message::data(&ApiError::from(error).body())]),
        };
        let chunk = match event {
            ChatEvent::Started { .. } => self.chunk(index, json!({"role": "assistant", "content": ""}), None),
            ChatEvent::Text { delta, logprobs } => {
                let mut chunk = self.chunk(index, json!({"content": delta}), None);
                if !logprobs.is_empty() {
                    chunk["choices"][0]["logprobs"] = json!({"content": entries(&self.engine, &logprobs)});
                }
                chunk
            }
            ChatEvent::ToolCallStarted { index: call, id, name } => {
                let function = json!({"name": name, "arguments": ""});
                let call = json!({"index": call, "id": id, "type": "function", "function": function});
                self.chunk(index, json!({"tool_calls": [call]}), None)
            }
            ChatEvent::ToolCallArguments { index: call, delta } => {
                let call = json!({"index": call, "function": {"arguments": delta}});
                self.chunk(index, json!({"tool_calls": [call]}), None)
            }
            ChatEvent::ToolCallFinished { .. } => return Step::Go(Vec::new()),
            ChatEvent::Finished(outcome) => {
                self.usage.add(&outcome.usage);
                self.chunk(index, json!({}), Some(finish_reason(outcome.finish)))
            }
        };
        Step::Go(vec![Message::data(&chunk)])
    }

    fn end(&mut self) -> Vec<Message> {
        let usage = self.sends_usage.then(|| Message::data(&self.envelope.with_usage(&self.usage)));
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
    let named = headers::session(headers)?.or_else(|| body.parameters.user.clone());
    let invocation = Invocation {
        session: caller.session(&named.unwrap_or_else(|| uuid::Uuid::now_v7().simple().to_string()))?,
        principal: caller.tenant.into(),
        agent: agent.to_owned(),
        text,
        data: None,
        origin: Origin::Chat,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: headers::idempotency_key(headers)?,
        detached: false,
    };
    let model = format!("agent:{agent}");
    let run = gateway.host.invoke(invocation).await.map_err(|error| match error {
        RuntimeError::AgentNotFound { .. } => {
            ApiError::new(StatusCode::NOT_FOUND, "model_not_found", error.to_string())
        }
        error => error.into(),
    })?;
    let mut events = run_events(run).boxed();
    if body.parameters.streams() {
        let first = match events.next().await {
            Some(Err(error)) => return Err(error.into()),
            first => first,
        };
        let writer = AgentChunkWriter {
            envelope: Envelope::new("chatcmpl", "chat.completion.chunk", &model),
            usage: Usage::default(),
            sends_usage: body.parameters.streams_usage(),
            said: String::new(),
            spent,
        };
        return Ok(sse::respond(stream::iter(first).chain(events), writer));
    }
    while let Some(event) = events.next().await {
        if let RunEvent::Done(outcome) = event? {
            spent.add(&outcome.usage);
            let message = json!({"role": "assistant", "content": outcome.text});
            let choice = json!({"index": 0, "message": message, "finish_reason": "stop", "logprobs": null});
            let mut answer = Envelope::new("chatcmpl", "chat.completion", &model).with_choices(vec![choice]);
            answer["usage"] = usage_json(&outcome.usage);
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
    spent: Spent,
}

impl AgentChunkWriter {
    fn chunk(&self, delta: Value, finish: Option<&str>) -> Message {
        Message::data(
            &self.envelope.with_choices(vec![json!({"index": 0, "delta": delta, "finish_reason": finish})]),
        )
    }
}

impl Writer for AgentChunkWriter {
    type Item = Result<RunEvent, RuntimeError>;

    fn write(&mut self, event: Self::Item) -> Step {
        Step::Go(match event {
            Ok(RunEvent::Started { .. }) => {
                vec![self.chunk(json!({"role": "assistant", "content": ""}), None)]
            }
            Ok(RunEvent::Delta { text }) => {
                self.said.push_str(&text);
                vec![self.chunk(json!({"content": text}), None)]
            }
            Ok(RunEvent::Done(outcome)) => {
                self.spent.add(&outcome.usage);
                self.usage = outcome.usage;
                // Text that the model generated before it called tools is not part of the reply, and an agent may
                // reply with more than it let its model stream.
                let rest = match outcome.text.strip_prefix(&self.said) {
                    Some(rest) => rest,
                    None if self.said.ends_with(&outcome.text) => "",
                    None => &outcome.text,
                };
                let rest = (!rest.is_empty()).then(|| self.chunk(json!({"content": rest}), None));
                rest.into_iter().chain([self.chunk(json!({}), Some("stop"))]).collect()
            }
            Ok(_) => Vec::new(),
            Err(error) => return Step::Break(vec![Message::data(&ApiError::from(error).body())]),
        })
    }

    fn end(&mut self) -> Vec<Message> {
        let usage = self.sends_usage.then(|| Message::data(&self.envelope.with_usage(&self.usage)));
        usage.into_iter().chain([Message::done()]).collect()
    }
}
