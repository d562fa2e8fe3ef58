//! Continues the streams of requests whose clients lost their connection, or their host.
//!
//! The protocol crate continues the stream of a request that this host still answers. After the answer, or at another host, the
//! ticket in the event's id tells what was asked: the result of a call is that of its turn, which is durable; every other
//! request gets an error that says that its answer is lost.
//!
//! Invariant: each stream that ends here ends with one answer to its request, unless the client had that already, or this host
//! ends, in which case the client finds the answer at another host under the same id.

use super::{
    Mcp,
    answer::{self, CODE, CallOutcome, Follower, RetryKey},
    call::{self, Shape},
    marks::{self, Resumption},
    scope::Scope,
    server,
    tickets::{CalledTool, Ticket},
};
use axum::{
    http::{HeaderMap, HeaderName, header},
    response::{
        IntoResponse, Response,
        sse::{Event, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt, future::ready, stream};
use rmcp::{
    ErrorData,
    model::{CallToolResult, ErrorCode, ServerJsonRpcMessage, ServerResult},
    transport::streamable_http_server::session::{ServerSseMessage, SessionId},
};
use serde_json::json;
use skep_runtime::{AgentHost, RuntimeError, plain_session};
use std::{
    convert::Infallible,
    time::{Duration, Instant},
};

const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
/// Time after which a client opens a stream again that has ended.
pub(super) const RECONNECT: Duration = Duration::from_secs(3);
/// Time between two messages that keep a connection open.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The code of the protocol's error for an answer that is lost, in the range that JSON-RPC leaves to servers.
const ANSWER_LOST: ErrorCode = ErrorCode(-32_050);
/// Time for which a turn is looked for again that cannot be followed now.
const PATIENCE: Duration = Duration::from_secs(60);
/// Delay between two attempts to follow a turn.
const PAUSE: Duration = Duration::from_millis(500);

/// The rest of a request's stream, which is its answer.
struct Rest {
    host: AgentHost,
    scope: Scope,
    /// The agent session of calls that name none.
    session: String,
    approval_wait: Duration,
    ticket: Option<Ticket>,
}

/// Returns the last event that a client has seen of a stream that it continues.
pub(super) fn last_event_id(headers: &HeaderMap) -> Option<String> {
    let accepts = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
    let mut types = accepts.flat_map(|value| value.split(','));
    let is_accepted = |kind: &str| {
        kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream"))
    };
    // A client that accepts no events gets the answer of the protocol crate.
    types.any(is_accepted).then(|| headers.get(LAST_EVENT_ID)?.to_str().ok().map(str::to_owned)).flatten()
}

impl Mcp {
    /// Continues the stream of a request. Returns `None` for the session's own stream, which the protocol crate continues.
    pub(super) async fn resume(&self, id: &str, last_event_id: &str, scope: Scope) -> Option<Response> {
        let ticket = match marks::resumption(last_event_id, self.records.epoch(id)) {
            Resumption::NewsHere(_) | Resumption::News => return None,
            Resumption::Answered => return Some(respond(stream::empty())),
            Resumption::Here(event, ticket) => {
                let session: SessionId = id.into();
                match self.sessions.resume_request(&session, &event, ticket.clone()).await {
                    Ok(events) => return Some(respond(events)),
                    Err(error) => tracing::debug!(%error, "a request is not being answered anymore"),
                }
                ticket
            }
            Resumption::Lost(ticket) => ticket,
        };
        let rest = Rest {
            host: self.host.clone(),
            scope,
            session: server::agent_session(Some(id)),
            approval_wait: self.approval_wait,
            ticket: Ticket::decode(&ticket, &self.tickets.of_session(id)),
        };
        let opening = ServerSseMessage::priming(last_event_id, RECONNECT);
        let answered = marks::answered(last_event_id);
        let answer = stream::once(rest.answer())
            .filter_map(ready)
            .map(move |answer| ServerSseMessage::new(answered.clone(), answer));
        Some(respond(stream::iter([opening]).chain(answer)))
    }
}

impl Rest {
    /// Returns the answer to the request; `None` if this host ends before it is known.
    async fn answer(self) -> Option<ServerJsonRpcMessage> {
        let Some(Ticket { request, call }) = &self.ticket else {
            return Some(ServerJsonRpcMessage::error(lost(), None));
        };
        let answer = match call {
            Some(call) => self.result(call).await.transpose()?,
            None => Err(lost()),
        };
        Some(match answer {
            Ok(result) => {
                let mut result = ServerResult::CallToolResult(result);
                // Clients of all versions take a result without its type as complete, and old ones know no type.
                result.strip_result_type_for_legacy_peer();
                ServerJsonRpcMessage::response(result, request.clone())
            }
            Err(error) => ServerJsonRpcMessage::error(error, Some(request.clone())),
        })
    }

    /// Returns the result of a call, once its turn has ended or has waited for an approval for too long.
    async fn result(&self, call: &CalledTool) -> Result<Option<CallToolResult>, ErrorData> {
        let target = self.scope.target(&call.name);
        if !self.scope.includes(target.agent) {
            return Err(call::unknown(&call.name, &"this key is not for this agent"));
        }
        let shape = call::shape(&self.host, &target).map_err(|error| call::unknown(&call.name, &error))?;
        let named = call.session.as_deref().unwrap_or(&self.session);
        let session = match self.scope.caller.tenant.session(named) {
            Ok(session) => session,
            Err(error) => return Ok(Some(answer::refusal(&error))),
        };
        let began = Instant::now();
        loop {
            let error = match self.followed(call, target.agent, &session, &shape).await {
                Ok((CallOutcome::Outcome(outcome), _)) => {
                    let result = answer::result(outcome, plain_session(&session).to_owned(), shape.form);
                    return Ok(Some(result.unwrap_or_else(|error| answer::refusal(&error))));
                }
                Ok((CallOutcome::PendingApproval { approval, .. }, turn_id)) => {
                    let key = call.own_key.as_ref().unwrap_or(&call.spare_key).clone();
                    let again = RetryKey { key, turn_id };
                    return Ok(Some(answer::not_yet(&approval, &target, plain_session(&session), &again)));
                }
                Err(error) => error,
            };
            match error {
                RuntimeError::ShuttingDown => return Ok(None),
                RuntimeError::TurnNotFound { .. } => return Ok(Some(answer::unknown_outcome())),
                error if is_passing(&error) && began.elapsed() < PATIENCE => {
                    tracing::debug!(%error, "a turn cannot be followed yet");
                    tokio::time::sleep(PAUSE).await;
                }
                error => return Ok(Some(answer::refusal(&error))),
            }
        }
    }

    /// Follows the turn of a call. Returns its outcome and its id.
    async fn followed(
        &self,
        call: &CalledTool,
        agent: &str,
        session: &str,
        shape: &Shape,
    ) -> Result<(CallOutcome, String), RuntimeError> {
        let run = match &call.turn {
            Some(turn) => self.host.follow(agent, session, turn).await?,
            None => self.host.follow_keyed(agent, session, &call.spare_key).await?,
        };
        let turn_id = run.turn_id().to_owned();
        // A call without a key cannot be repeated, so its client waits for the decision.
        let patience = (call.own_key.is_some() || shape.needs_approval).then_some(self.approval_wait);
        let client = Follower { patience, approver: None, link: None };
        Ok((answer::follow(run, client).await?, turn_id))
    }
}

/// Returns whether a turn that failed to be followed may be followed a moment later.
fn is_passing(error: &RuntimeError) -> bool {
    let is_end = matches!(error, RuntimeError::TurnFailed { .. });
    !is_end && matches!(error.code(), "mailbox_full" | "session_elsewhere" | "host_gone" | "store_away")
}

/// Returns the error for a request whose answer nobody has.
fn lost() -> ErrorData {
    let message = "the answer to this request is lost, because its stream broke and only results of calls are kept; send the \
                   request again";
    ErrorData::new(ANSWER_LOST, message, Some(json!({ CODE: "answer_lost" })))
}

/// Returns a response that sends these events.
fn respond(events: impl Stream<Item = ServerSseMessage> + Send + 'static) -> Response {
    let events = events.map(|ServerSseMessage { event_id, message, retry, .. }| {
        let text = message.map(|message| serde_json::to_string(&*message));
        let text = text.map(|text| text.expect("messages always serialize")).unwrap_or_default();
        let mut event = Event::default().data(text);
        if let Some(id) = event_id {
            event = event.id(id);
        }
        if let Some(retry) = retry {
            event = event.retry(retry);
        }
        Ok::<_, Infallible>(event)
    });
    Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}
