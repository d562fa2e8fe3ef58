//! `/v1/agents/{agent}/sessions/{session}/messages`: sends a message to a session and responds with JSON or events.

use crate::{
    ApiError, Gateway,
    body::JsonBody,
    caller::Caller,
    headers,
    openai::usage,
    routes::turns,
    spent::Spent,
    sse::{self, Message, Step, Writer},
};
use axum::{
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use serde::Deserialize;
use skep_api::{
    AcceptedTurn, ApprovalDecided, ApprovalRequired, Decision, Delta, Generation, GenerationRestarted,
    ModelChanged, ModelChosen, SendMessage, Thinking, ToolCall, ToolResult, Turn, TurnEvent, TurnStarted,
    TurnTiming,
};
use skep_engine::Priority;
use skep_runtime::{
    Invocation, Json, Origin, Outcome, RunEvent, RunHandle, RuntimeError, Timing, plain_session,
};
use utoipa::IntoParams;

#[derive(Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
pub(crate) struct SendQuery {
    /// Whether to respond as soon as the message is durable and let the turn continue on its own.
    #[serde(default)]
    detach: bool,
}

/// Sends a message to a session of an agent, which runs a turn. The session exists from its first message on.
///
/// The answer is one object; or with `accept: text/event-stream`, the events of the turn. A turn ends with its client,
/// unless the request has an idempotency key, `detach`, or the header `prefer: respond-async`; with the last two, the
/// answer is the turn's id.
#[utoipa::path(post, path = "/v1/agents/{agent}/sessions/{session}/messages", tag = "turns", operation_id = "send_message",
    params(
        ("agent" = String, Path, description = "Name of the agent"),
        ("session" = String, Path, description = "Id of the session"),
        SendQuery,
        ("idempotency-key" = Option<String>, Header, description = "The same message under the same key is the same turn"),
        ("prefer" = Option<String>, Header, description = "`respond-async` does the same as `detach`"),
    ),
    request_body = SendMessage,
    responses(
        (status = 200, description = "The answer, or the events of the turn, each with an id.",
            content((Turn = "application/json"), (TurnEvent = "text/event-stream"))),
        (status = 202, description = "The turn continues on its own.", body = AcceptedTurn,
            headers(("location" = String, description = "Path of the turn"))),
        (status = 404, description = "`agent_not_found`"),
        (status = 409, description = "`waiting_for_approval`, `model_gone`, `held_since_restore` or `turn_dropped`"),
        (status = 422, description = "`invalid_message`, `schema_unsatisfied`, `truncated` or `tool_failed`"),
        (status = 499, description = "The turn was cancelled: `cancelled`."),
        (status = 504, description = "`deadline_exceeded`"),
    ))]
pub(crate) async fn send(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<SendQuery>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<SendMessage<Json>>,
) -> Result<Response, ApiError> {
    if body.text.is_empty() && body.data.is_none() {
        let message = "the message is empty; send `text`, or `data`, or both";
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_message", message));
    }
    let spent = caller.spent().clone();
    let invocation = Invocation {
        key: caller.key().map(str::to_owned),
        principal: caller.tenant.into(),
        agent,
        session,
        text: body.text,
        data: body.data,
        origin: Origin::Direct,
        priority: Priority::Interactive,
        deadline: None,
        idempotency_key: headers::idempotency_key(&headers)?,
        detached: query.detach || headers::prefers_async(&headers),
    };
    answer(&gateway, invocation, headers::wants_events(&headers), spent).await
}

/// Runs a turn and responds in the form that the client requested.
pub(crate) async fn answer(
    gateway: &Gateway,
    invocation: Invocation,
    as_events: bool,
    spent: Spent,
) -> Result<Response, ApiError> {
    let (agent, detached) = (invocation.agent.clone(), invocation.detached);
    let session = plain_session(&invocation.session).to_owned();
    let mut run = gateway.host.invoke(invocation).await?;
    if detached {
        return Ok(turns::accepted(&agent, &session, run.turn_id()));
    }
    let mut turn = TurnJson::new(session, run.turn_id().to_owned(), spent);
    if !as_events {
        while let Some(event) = run.next().await {
            if let (_, Some(done)) = turn.take(event?) {
                return Ok(([(header::CONTENT_TYPE, "application/json")], done).into_response());
            }
        }
        return Err(RuntimeError::Cancelled.into());
    }
    // A refusal is a status, not an event, so the first event is awaited before the response starts.
    let first = match run.next().await {
        Some(Err(error)) => return Err(error.into()),
        first => first,
    };
    let first = first.map(|first| (run.last_id(), first));
    Ok(sse::respond(stream::iter(first).chain(numbered_events(run)).boxed(), turn))
}

/// Returns the events of a run. Dropping the stream drops the run's handle.
pub(crate) fn run_events(run: RunHandle) -> impl Stream<Item = Result<RunEvent, RuntimeError>> + Send {
    numbered_events(run).map(|(_, event)| event)
}

/// Returns the events of a run, each with its number.
pub(super) fn numbered_events(run: RunHandle) -> impl Stream<Item = NumberedEvent> + Send {
    stream::unfold(run, |mut run| async move {
        let event = run.next().await?;
        let id = run.last_id().filter(|_| event.is_ok());
        Some(((id, event), run))
    })
}

pub(super) type NumberedEvent = (Option<u64>, Result<RunEvent, RuntimeError>);

/// The JSON of a turn, built from its events.
pub(super) struct TurnJson {
    session: String,
    turn_id: String,
    /// The number of the last event that the client has seen.
    seen: Option<u64>,
    tool_calls: Vec<ToolCall<Json>>,
    first_token_us: Option<u64>,
    spent: Spent,
}

impl TurnJson {
    pub(super) fn new(session: String, turn_id: String, spent: Spent) -> Self {
        TurnJson { session, turn_id, seen: None, tool_calls: Vec::new(), first_token_us: None, spent }
    }

    /// Skips the events up to `seen`, which the client has already received.
    pub(super) fn after(self, seen: Option<u64>) -> Self {
        TurnJson { seen, ..self }
    }

    /// Returns the message for a stream and, when the turn is done, the whole response.
    fn take(&mut self, event: RunEvent) -> (Message, Option<String>) {
        let event = match event {
            RunEvent::Started { turn } => {
                TurnEvent::Turn(TurnStarted { turn, turn_id: self.turn_id.clone() })
            }
            RunEvent::Delta { text } => TurnEvent::Delta(Delta { text }),
            RunEvent::ToolCall { id, name, arguments } => {
                let call = ToolCall { id, name, arguments, result: None, error: None };
                self.tool_calls.push(call.clone());
                TurnEvent::ToolCall(call)
            }
            RunEvent::ToolResult { id, name, outcome } => {
                let (result, error) = match outcome {
                    Ok(result) => (Some(result), None),
                    Err(error) => (None, Some(error)),
                };
                if let Some(call) = self.tool_calls.iter_mut().find(|call| call.id == id) {
                    (call.result, call.error) = (result.clone(), error.clone());
                }
                TurnEvent::ToolResult(ToolResult { id, name, result, error })
            }
            RunEvent::ApprovalRequired { id, tool, arguments, expires_at_ms } => {
                TurnEvent::ApprovalRequired(ApprovalRequired { id, tool, arguments, expires_at_ms })
            }
            RunEvent::ApprovalDecided { id, approved, reason } => {
                let decision = if approved { Decision::Approve } else { Decision::Deny };
                TurnEvent::ApprovalDecided(ApprovalDecided { id, decision, reason })
            }
            RunEvent::ModelChosen { model, attempts } => {
                TurnEvent::ModelChosen(ModelChosen { model, attempts })
            }
            RunEvent::Thinking { text } => TurnEvent::Thinking(Thinking { text }),
            RunEvent::GenerationRestarted => TurnEvent::GenerationRestarted(GenerationRestarted {}),
            RunEvent::ModelChanged { conversation, from, to } => {
                TurnEvent::ModelChanged(ModelChanged { conversation, from, to })
            }
            RunEvent::Generation { usage: tokens, timing } => {
                self.first_token_us.get_or_insert(timing.first_token_us);
                TurnEvent::Usage(Generation { usage: usage(&tokens), timing: times(&timing) })
            }
            RunEvent::Done(outcome) => {
                self.spent.add(&outcome.usage);
                let (name, done) = TurnEvent::Done(self.done(outcome)).parts();
                return (Message::of_text(name, done.clone()), Some(done));
            }
        };
        (message(&event), None)
    }

    fn done(&mut self, outcome: Outcome) -> Turn<Json> {
        Turn {
            text: outcome.text,
            data: outcome.data,
            session: self.session.clone(),
            turn: outcome.turn,
            turn_id: self.turn_id.clone(),
            tool_calls: std::mem::take(&mut self.tool_calls),
            usage: usage(&outcome.usage),
            timing: TurnTiming {
                first_token_ms: self.first_token_us.map(milliseconds),
                total_ms: milliseconds(outcome.elapsed_us),
            },
        }
    }
}

fn message(event: &TurnEvent<Json>) -> Message {
    let (name, data) = event.parts();
    Message::of_text(name, data)
}

impl Writer for TurnJson {
    type Item = NumberedEvent;

    fn write(&mut self, (id, item): Self::Item) -> Step {
        match item {
            Ok(event) => {
                let message = Message { id, ..self.take(event).0 };
                let is_new = self.seen.is_none_or(|seen| id.is_none_or(|id| id > seen));
                Step::Go(is_new.then_some(message).into_iter().collect())
            }
            Err(error) => Step::Break(vec![message(&TurnEvent::Error(ApiError::from(error).body()))]),
        }
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

fn times(timing: &Timing) -> skep_api::Timing {
    skep_api::Timing {
        queue_ms: milliseconds(timing.queue_us),
        first_token_ms: milliseconds(timing.first_token_us),
        total_ms: milliseconds(timing.total_us),
    }
}

fn milliseconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1000.0
}
