//! `/mcp`: the deployed agents and their tools, for clients of the Model Context Protocol over streamable HTTP.
//! `/mcp/{agent}`: one agent, with its tools under their own names, its prompts and its resources.
//!
//! The official crate implements the protocol, both the revisions with sessions and the one without. This module
//! defines the meaning of calls, and the bounds. In revisions with sessions, a client that disconnects has not
//! cancelled anything, as the protocol specifies: its turns continue until the session is removed. In the revision
//! without sessions, disconnecting cancels. A durable turn, which needs an approval or has a key from the client,
//! continues in either case, until it is cancelled explicitly.

mod answer;
mod approval;
mod call;
mod catalog;
mod completion;
mod content;
mod durable;
mod link;
mod marking;
mod marks;
mod missed;
mod prompts;
mod records;
mod resources;
mod resumed;
mod scope;
mod server;
mod sessions;
mod subscriptions;
mod tickets;

use crate::{
    ApiError, Gateway,
    body::{self, run_on_compute},
    caller::Caller,
};
use axum::{
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, HeaderName, Method, StatusCode, header},
    response::Response,
};
use futures::StreamExt;
use records::Records;
use rmcp::{
    model::ClientJsonRpcMessage,
    transport::{
        StreamableHttpServerConfig, StreamableHttpService,
        streamable_http_server::{SessionManager, session::SessionStore},
    },
};
use scope::{PathAgent, Scope};
use server::AgentServer;
use sessions::BoundedSessions;
use skep_engine::Cancel;
use skep_runtime::AgentHost;
use std::{sync::Arc, time::Duration};
use tickets::TicketKey;
use tokio::sync::watch;
use tracing::Span;

/// Bounds of `/mcp`.
#[derive(Clone, Debug)]
pub struct McpOptions {
    /// Maximum number of client sessions. To make room for another, the tenant with the most sessions loses its least
    /// recently used one, whose client must initialize again.
    pub max_sessions: usize,
    /// Maximum time that a session without messages is kept. This is longer than any turn.
    pub session_idle: Duration,
    /// Maximum time that a call that needs an approval blocks its client, which then gets the approval's id. This is
    /// shorter than the timeouts of clients.
    pub approval_wait: Duration,
}

impl Default for McpOptions {
    fn default() -> Self {
        McpOptions {
            max_sessions: 1_000,
            session_idle: Duration::from_secs(30 * 60),
            approval_wait: Duration::from_secs(45),
        }
    }
}

/// The purpose of the secret of [`Mcp::new`], which the hosts of a cluster derive from their key.
pub(crate) const TICKETS: &str = "tickets of MCP streams 1";

/// The service behind the route. Dropping it terminates every session.
pub(crate) struct Mcp {
    host: AgentHost,
    approval_wait: Duration,
    service: StreamableHttpService<AgentServer, BoundedSessions>,
    sessions: Arc<BoundedSessions>,
    records: Arc<Records>,
    tickets: Arc<TicketKey>,
    /// Makes requests for sessions that continue here wait for each other, so that each session continues once.
    continuing: tokio::sync::Mutex<()>,
    closing: watch::Sender<bool>,
}

/// The span of the HTTP request that a call was received in.
#[derive(Clone)]
struct RequestSpan(Span);

impl Mcp {
    /// Hosts with the same `ticket_secret` continue each other's streams. Without one, a host continues only its own.
    pub(crate) fn new(
        host: AgentHost,
        options: &McpOptions,
        max_body_bytes: usize,
        ticket_secret: Option<[u8; 32]>,
    ) -> Self {
        let closing = watch::Sender::new(false);
        let mut config = StreamableHttpServerConfig::default()
            // `access::guard` checks both for all routes.
            .disable_allowed_hosts()
            .disable_allowed_origins()
            .with_max_request_body_bytes(max_body_bytes);
        let records = Arc::new(Records::new(host.clone(), options.session_idle));
        if records.are_shared() {
            let store: Arc<dyn SessionStore> = records.clone();
            config.session_store = Some(store);
        }
        let tickets = Arc::new(TicketKey::new(ticket_secret));
        let (max, idle) = (options.max_sessions, options.session_idle);
        let sessions = Arc::new(BoundedSessions::new(max, idle, records.clone(), tickets.clone()));
        let (ending, approval_wait, recorded) = (closing.subscribe(), options.approval_wait, records.clone());
        let served = host.clone();
        let server =
            move || Ok(AgentServer::new(served.clone(), recorded.clone(), ending.clone(), approval_wait));
        let service = StreamableHttpService::new(server, sessions.clone(), config);
        let continuing = tokio::sync::Mutex::default();
        Mcp { host, approval_wait, service, sessions, records, tickets, continuing, closing }
    }

    /// Terminates the streams that only wait for notifications, so that shutdown does not wait for them. Other hosts continue the
    /// sessions.
    pub(crate) fn close(&self) {
        self.records.close();
        self.closing.send_replace(true);
    }

    /// Returns the session that a request names, if this host does not have it.
    pub(crate) fn session_elsewhere(&self, headers: &HeaderMap) -> Option<String> {
        session_id(headers).ok()?.filter(|id| !self.sessions.has(id))
    }

    /// Ends a stream of notifications when this host ends.
    pub(crate) fn until_closed(&self, response: Response) -> Response {
        let mut closing = self.closing.subscribe();
        let closed = async move {
            // The sender is dropped with the server.
            let _ = closing.wait_for(|closing| *closing).await;
        };
        response.map(|body| Body::from_stream(body.into_data_stream().take_until(Box::pin(closed))))
    }
}

impl Drop for Mcp {
    fn drop(&mut self) {
        self.close();
        self.service.config.cancellation_token.cancel();
    }
}

/// Maximum number of JSON values in a message, because the protocol crate parses it where other requests wait.
const MAX_VALUES: usize = 1 << 18;
/// Time after which a request for a session that has moved is sent again.
const MOVED_RETRY_MS: u32 = 500;
const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");

/// Takes a message of the Model Context Protocol (streamable HTTP): agents and their tools are the server's tools.
#[utoipa::path(post, path = "/mcp", tag = "mcp", operation_id = "send_mcp_message",
    params(("mcp-session-id" = Option<String>, Header, description = "The session that the answer to `initialize` names")),
    request_body(content = Value, description = "A message of JSON-RPC"),
    responses(
        (status = 200, description = "The answer, or a stream of messages that ends with it.",
            content((Value = "application/json"), (Value = "text/event-stream"))),
        (status = 202, description = "A message that needs no answer was taken."),
        (status = 404, description = "`session_not_found`; or an error of the protocol, as JSON-RPC"),
        (status = 406, description = "`accept` does not name both types of answers."),
        (status = 415, description = "The body's type is not `application/json`."),
    ))]
pub(crate) async fn send(
    gateway: State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    serve(gateway, caller, None, request).await
}

/// Takes a message of the Model Context Protocol (streamable HTTP) for one agent: its tools, prompts and resources are the
/// server's.
#[utoipa::path(post, path = "/mcp/{agent}", tag = "mcp", operation_id = "send_mcp_message_to_agent",
    params(("agent" = String, Path, description = "Name of the agent"),
        ("mcp-session-id" = Option<String>, Header, description = "The session that the answer to `initialize` names")),
    request_body(content = Value, description = "A message of JSON-RPC"),
    responses(
        (status = 200, description = "The answer, or a stream of messages that ends with it.",
            content((Value = "application/json"), (Value = "text/event-stream"))),
        (status = 202, description = "A message that needs no answer was taken."),
        (status = 404, description = "`agent_not_found` or `session_not_found`; or an error of the protocol, as JSON-RPC"),
        (status = 406, description = "`accept` does not name both types of answers."),
        (status = 415, description = "The body's type is not `application/json`."),
    ))]
pub(crate) async fn send_to_agent(
    gateway: State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(gateway, caller, Some(agent), request).await
}

/// Opens the stream of notifications of a session with one agent.
#[utoipa::path(get, path = "/mcp/{agent}", tag = "mcp", operation_id = "open_mcp_stream_of_agent",
    params(("agent" = String, Path, description = "Name of the agent"),
        ("mcp-session-id" = Option<String>, Header, description = "The session that the answer to `initialize` names"),
        ("last-event-id" = Option<String>, Header, description = "Continues after this event")),
    responses(
        (status = 200, description = "Notifications, as messages of JSON-RPC.", body = Value, content_type = "text/event-stream"),
        (status = 400, description = "The request names no session."),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
        (status = 406, description = "`accept` does not name `text/event-stream`."),
    ))]
pub(crate) async fn listen_to_agent(
    gateway: State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(gateway, caller, Some(agent), request).await
}

/// Ends a session with one agent.
#[utoipa::path(delete, path = "/mcp/{agent}", tag = "mcp", operation_id = "end_mcp_session_with_agent",
    params(("agent" = String, Path, description = "Name of the agent"),
        ("mcp-session-id" = Option<String>, Header, description = "The session that the answer to `initialize` names")),
    responses(
        (status = 202, description = "The session has ended."),
        (status = 400, description = "The request names no session."),
        (status = 404, description = "`agent_not_found` or `session_not_found`"),
    ))]
pub(crate) async fn end_of_agent(
    gateway: State<Gateway>,
    caller: Caller,
    Path(agent): Path<String>,
    request: Request,
) -> Result<Response, ApiError> {
    serve(gateway, caller, Some(agent), request).await
}

/// Opens the stream of a session's notifications.
#[utoipa::path(get, path = "/mcp", tag = "mcp", operation_id = "open_mcp_stream",
    params(("mcp-session-id" = Option<String>, Header, description = "The session that the answer to `initialize` names"),
        ("last-event-id" = Option<String>, Header, description = "Continues after this event")),
    responses(
        (status = 200, description = "Notifications, as messages of JSON-RPC.", body = Value, content_type = "text/event-stream"),
        (status = 400, description = "The request names no session."),
        (status = 404, description = "`session_not_found`"),
        (status = 406, description = "`accept` does not name `text/event-stream`."),
    ))]
pub(crate) async fn listen(
    gateway: State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    serve(gateway, caller, None, request).await
}

/// Ends a session.
#[utoipa::path(delete, path = "/mcp", tag = "mcp", operation_id = "end_mcp_session",
    params(("mcp-session-id" = Option<String>, Header, description = "The session that the answer to `initialize` names")),
    responses(
        (status = 202, description = "The session has ended."),
        (status = 400, description = "The request names no session."),
        (status = 404, description = "`session_not_found`"),
    ))]
pub(crate) async fn end(
    gateway: State<Gateway>,
    caller: Caller,
    request: Request,
) -> Result<Response, ApiError> {
    serve(gateway, caller, None, request).await
}

/// Serves a request. A session belongs to its caller, and to other callers it does not exist.
async fn serve(
    State(gateway): State<Gateway>,
    caller: Caller,
    agent: Option<String>,
    request: Request,
) -> Result<Response, ApiError> {
    if let Some(agent) = &agent {
        gateway.host.find_agent(agent).await?;
    }
    let (agent, requester, mcp) = (agent.map(PathAgent), caller.requester(), &gateway.mcp);
    let named = session_id(request.headers())?;
    if let Some(id) = &named {
        let is_own = match mcp.sessions.has(id) {
            true => mcp.sessions.is_of(id, &requester, agent.as_ref()),
            false => mcp.records.take(id, &requester, agent.as_ref(), |id| mcp.sessions.has(id)).await?,
        };
        if !is_own {
            // If several hosts are asked for a session at the same time, one of them continues it.
            let has_moved = !mcp.sessions.has(id) && mcp.records.is_elsewhere(id).await?;
            return Err(if has_moved { session_elsewhere() } else { session_not_found() });
        }
        mcp.records.touch(id);
    }
    let is_stream_of_news = request.method() == Method::GET;
    if let (true, Some(id), Some(last)) =
        (is_stream_of_news, &named, resumed::last_event_id(request.headers()))
    {
        let scope = Scope { caller: caller.clone(), agent: agent.as_ref().map(|agent| agent.0.clone()) };
        if let Some(response) = mcp.resume(id, &last, scope).await {
            return Ok(mcp.until_closed(response));
        }
    }
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(RequestSpan(Span::current()));
    if let Some(agent) = &agent {
        parts.extensions.insert(agent.clone());
    }
    let request = if parts.method == Method::POST {
        // The body is read here, where it has a deadline and an invalid message gets an error that says so.
        let bytes = body::read(Request::from_parts(parts.clone(), body), &gateway).await?;
        let (tenant, read) = (caller.tenant.to_string(), bytes.clone());
        let check = move |_: &Cancel| {
            body::check_values(&read, MAX_VALUES)?;
            body::parse::<ClientJsonRpcMessage>(&read).map(drop)
        };
        run_on_compute(&gateway, &tenant, bytes.len(), check).await?;
        Request::from_parts(parts, Body::from(bytes))
    } else {
        Request::from_parts(parts, Body::empty())
    };
    let is_taken = named.as_ref().is_some_and(|id| !mcp.sessions.has(id));
    let continuing = if is_taken { Some(mcp.continuing.lock().await) } else { None };
    let response = mcp.service.handle(request).await.map(Body::new);
    drop(continuing);
    if named.is_none()
        && let Some(begun) = session_id(response.headers())?
    {
        mcp.sessions.belongs_to(&begun, requester.clone(), agent.clone());
        if let Err(error) = mcp.records.add(&begun, &requester, agent.as_ref()).await {
            let closed = mcp.sessions.close_session(&begun.into()).await;
            closed.unwrap_or_else(|error| tracing::debug!(%error, "a session cannot be closed"));
            return Err(error);
        }
    }
    // An error of the protocol is JSON and has its own code.
    if response.status() == StatusCode::NOT_FOUND && !is_json(&response) {
        return Err(session_not_found());
    }
    if !is_stream_of_news || !response.status().is_success() {
        return Ok(response);
    }
    Ok(mcp.until_closed(response))
}

fn session_id(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let mut named = headers.get_all(SESSION_ID).iter();
    let id = named.next().map(|id| id.to_str().map(str::to_owned));
    match (id, named.next()) {
        (None, _) => Ok(None),
        (Some(Ok(id)), None) => Ok(Some(id)),
        _ => Err(session_not_found()),
    }
}

fn session_not_found() -> ApiError {
    let message = "there is no MCP session with this id: it was unused for too long, was removed to make room for others, \
                   belongs to another caller, or ended with its host; send `initialize` to start a new one";
    ApiError::new(StatusCode::NOT_FOUND, "session_not_found", message)
}

/// Returns the error for a session that another host has taken over since this one was asked for it, which the next request finds.
fn session_elsewhere() -> ApiError {
    let message = "another host has just continued this MCP session; send the request again";
    let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "session_elsewhere", message);
    ApiError { retry_after_ms: Some(MOVED_RETRY_MS), ..error }
}

fn is_json(response: &Response) -> bool {
    let kind = response.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    kind.is_some_and(|kind| kind.starts_with("application/json"))
}
