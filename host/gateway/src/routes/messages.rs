//! `/v1/agents/{agent}/sessions/{session}/messages`: a message to a session, answered as JSON or as events.

use crate::{
    ApiError, Gateway,
    access::Caller,
    body::JsonBody,
    headers,
    openai::usage_json,
    routes::turns,
    spent::Spent,
    sse::{self, Message, Step, Writer},
};
use axum::{
    Json,
    extract::{Path, Query, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use skep_engine::Priority;
use skep_runtime::{Invocation, Origin, Outcome, RunEvent, RunHandle, RuntimeError, Timing, plain_session};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageBody {
    #[serde(default)]
    text: String,
    data: Option<Value>,
}

#[derive(Deserialize)]
pub(crate) struct SendQuery {
    /// Answer as soon as the message is durable, and let the turn go on by itself.
    #[serde(default)]
    detach: bool,
}

pub(crate) async fn send(
    State(gateway): State<Gateway>,
    caller: Caller,
    Path((agent, session)): Path<(String, String)>,
    Query(query): Query<SendQuery>,
    headers: HeaderMap,
    JsonBody(body): JsonBody<MessageBody>,
) -> Result<Response, ApiError> {
    if body.text.is_empty() && body.data.is_none() {
        let message = "the message is empty; send `text`, or `data`, or both";
        return Err(ApiError::new(StatusCode::BAD_REQUEST, "invalid_message", message));
    }
    let spent = caller.spent().clone();
    let invocation = Invocation {
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

/// Runs a turn and answers in the form that the client asked for.
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
                return Ok(Json(done).into_response());
            }
        }
        return Err(RuntimeError::Cancelled.into());
    }
    // A refusal is a status, not an event: wait for the first event before the answer begins.
    let first = match run.next().await {
        Some(Err(error)) => return Err(error.into()),
        first => first,
    };
    let first = first.map(|first| (run.last_id(), first));
    Ok(sse::respond(stream::iter(first).chain(numbered_events(run)).boxed(), turn))
}

/// The events of a run; dropping the stream drops the run's handle.
pub(crate) fn run_events(run: RunHandle) -> impl Stream<Item = Result<RunEvent, RuntimeError>> + Send {
    numbered_events(run).map(|(_, event)| event)
}

/// The same, each with its number.
pub(super) fn numbered_events(run: RunHandle) -> impl Stream<Item = NumberedEvent> + Send {
    stream::unfold(run, |mut run| async move {
        let event = run.next().await?;
        let id = run.last_id().filter(|_| event.is_ok());
        Some(((id, event), run))
    })
}

pub(super) type NumberedEvent = (Option<u64>, Result<RunEvent, RuntimeError>);

/// The answer of a turn as it grows.
pub(super) struct TurnJson {
    session: String,
    turn_id: String,
    /// The client has seen the events up to this one.
    seen: Option<u64>,
    tool_calls: Vec<Map<String, Value>>,
    first_token_us: Option<u64>,
    spent: Spent,
}

impl TurnJson {
    pub(super) fn new(session: String, turn_id: String, spent: Spent) -> Self {
        TurnJson { session, turn_id, seen: None, tool_calls: Vec::new(), first_token_us: None, spent }
    }

    /// For a client that has seen the events up to `seen`.
    pub(super) fn after(self, seen: Option<u64>) -> Self {
        TurnJson { seen, ..self }
    }

    /// The event for a stream, and the whole answer when the turn is done.
    fn take(&mut self, event: RunEvent) -> (Message, Option<Value>) {
        let message = match event {
            RunEvent::Started { turn } => {
                Message::named("turn", &json!({"turn": turn, "turn_id": self.turn_id}))
            }
            RunEvent::Delta { text } => Message::named("delta", &json!({"text": text})),
            RunEvent::ToolCall { id, name, arguments } => {
                let call = json!({"id": id, "name": name, "arguments": arguments});
                self.tool_calls.extend(call.as_object().cloned());
                Message::named("tool_call", &call)
            }
            RunEvent::ToolResult { id, name, outcome } => {
                let (key, value) = match outcome {
                    Ok(result) => ("result", result),
                    Err(error) => ("error", Value::String(error)),
                };
                if let Some(call) = self.tool_calls.iter_mut().find(|call| call["id"] == id) {
                    call.insert(key.to_owned(), value.clone());
                }
                Message::named("tool_result", &json!({"id": id, "name": name, key: value}))
            }
            RunEvent::ApprovalRequired { id, tool, arguments, expires_at_ms } => {
                let asked =
                    json!({"id": id, "tool": tool, "arguments": arguments, "expires_at_ms": expires_at_ms});
                Message::named("approval_required", &asked)
            }
            RunEvent::ApprovalDecided { id, approved, reason } => {
                let decision = if approved { "approve" } else { "deny" };
                Message::named("approval_decided", &json!({"id": id, "decision": decision, "reason": reason}))
            }
            RunEvent::ModelChanged { conversation, from, to } => {
                let change = json!({"conversation": conversation, "from": from, "to": to});
                Message::named("model_changed", &change)
            }
            RunEvent::Generation { usage, timing } => {
                self.first_token_us.get_or_insert(timing.first_token_us);
                Message::named("usage", &json!({"usage": usage_json(&usage), "timing": timing_json(&timing)}))
            }
            RunEvent::Done(outcome) => {
                self.spent.add(&outcome.usage);
                let done = self.done(outcome);
                return (Message::named("done", &done), Some(done));
            }
        };
        (message, None)
    }

    fn done(&mut self, outcome: Outcome) -> Value {
        json!({
            "text": outcome.text,
            "data": outcome.data,
            "session": self.session,
            "turn": outcome.turn,
            "turn_id": self.turn_id,
            "tool_calls": std::mem::take(&mut self.tool_calls),
            "usage": usage_json(&outcome.usage),
            "timing": {
                "first_token_ms": self.first_token_us.map(milliseconds),
                "total_ms": milliseconds(outcome.elapsed_us),
            },
        })
    }
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
            Err(error) => Step::Break(vec![Message::named("error", &ApiError::from(error).body())]),
        }
    }

    fn end(&mut self) -> Vec<Message> {
        Vec::new()
    }
}

fn timing_json(timing: &Timing) -> Value {
    json!({
        "queue_ms": milliseconds(timing.queue_us),
        "first_token_ms": milliseconds(timing.first_token_us),
        "total_ms": milliseconds(timing.total_us),
    })
}

fn milliseconds(microseconds: u64) -> f64 {
    microseconds as f64 / 1000.0
}
