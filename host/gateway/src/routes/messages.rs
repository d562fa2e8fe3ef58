//! `/v1/agents/{agent}/sessions/{session}/messages`: sends a message to a session and responds with JSON or events.

use crate::{
    ApiError, Gateway,
    body::JsonBody,
    caller::Caller,
    headers,
    openai::usage_json,
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
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use skep_engine::Priority;
use skep_runtime::{
    Invocation, Json, Origin, Outcome, RunEvent, RunHandle, RuntimeError, Timing, plain_session,
};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MessageBody {
    #[serde(default)]
    text: String,
    data: Option<Json>,
}

#[derive(Deserialize)]
pub(crate) struct SendQuery {
    /// Whether to respond as soon as the message is durable and let the turn continue on its own.
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
        return Err(ApiError::new(StatusCode::UNPROCESSABLE_ENTITY, "invalid_message", message));
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
    tool_calls: Vec<ToolCallJson>,
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
        let message = match event {
            RunEvent::Started { turn } => {
                Message::named("turn", &json!({"turn": turn, "turn_id": self.turn_id}))
            }
            RunEvent::Delta { text } => Message::named("delta", &json!({"text": text})),
            RunEvent::ToolCall { id, name, arguments } => {
                let call = ToolCallJson { id, name, arguments, outcome: None };
                let message = Message::named("tool_call", &call);
                self.tool_calls.push(call);
                message
            }
            RunEvent::ToolResult { id, name, outcome } => {
                let outcome = OutcomeJson::from(outcome);
                if let Some(call) = self.tool_calls.iter_mut().find(|call| call.id == id) {
                    call.outcome = Some(outcome.clone());
                }
                Message::named("tool_result", &ToolResultJson { id, name, outcome })
            }
            RunEvent::ApprovalRequired { id, tool, arguments, expires_at_ms } => {
                Message::named("approval_required", &AskedJson { id, tool, arguments, expires_at_ms })
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
                return (Message::of_text("done", done.clone()), Some(done));
            }
        };
        (message, None)
    }

    fn done(&mut self, outcome: Outcome) -> String {
        let done = DoneJson {
            text: &outcome.text,
            data: outcome.data.as_ref(),
            session: &self.session,
            turn: outcome.turn,
            turn_id: &self.turn_id,
            tool_calls: std::mem::take(&mut self.tool_calls),
            usage: usage_json(&outcome.usage),
            timing: json!({
                "first_token_ms": self.first_token_us.map(milliseconds),
                "total_ms": milliseconds(outcome.elapsed_us),
            }),
        };
        serde_json::to_string(&done).expect("strings, numbers and JSON always serialize")
    }
}

/// The whole response. It contains the data of agents exactly as they wrote it.
#[derive(Serialize)]
struct DoneJson<'a> {
    text: &'a str,
    data: Option<&'a Json>,
    session: &'a str,
    turn: u64,
    turn_id: &'a str,
    tool_calls: Vec<ToolCallJson>,
    usage: Value,
    timing: Value,
}

#[derive(Serialize)]
struct ToolCallJson {
    id: String,
    name: String,
    arguments: Json,
    #[serde(flatten)]
    outcome: Option<OutcomeJson>,
}

#[derive(Serialize)]
struct ToolResultJson {
    id: String,
    name: String,
    #[serde(flatten)]
    outcome: OutcomeJson,
}

/// The outcome of a call, which has one of the two members.
#[derive(Clone, Serialize)]
struct OutcomeJson {
    #[serde(skip_serializing_if = "Option::is_none")]
    result: Option<Json>,
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

#[derive(Serialize)]
struct AskedJson {
    id: String,
    tool: String,
    arguments: Json,
    expires_at_ms: u64,
}

impl From<Result<Json, String>> for OutcomeJson {
    fn from(outcome: Result<Json, String>) -> Self {
        match outcome {
            Ok(result) => OutcomeJson { result: Some(result), error: None },
            Err(error) => OutcomeJson { result: None, error: Some(error) },
        }
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
