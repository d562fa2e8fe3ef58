//! MCP servers that the operator configures: local processes that communicate over standard input and output, and
//! servers reached over streamable HTTP.
//!
//! A connection is opened when it is first needed, kept, and reopened after it breaks, with a growing delay after
//! failures. Everything a server sends is bounded in size, number and time, and is not trusted: the runtime compiles
//! its schemas and validates its results. A call whose caller is gone is cancelled at the server.

mod catalog;
mod connection;
mod forms;
mod http;
mod options;
mod outcome;
mod process;

pub use options::{McpBounds, McpForms, McpOptions, McpTransport};

use crate::{ServedTool, ToolServer, ToolServerError};
use connection::Connection;
use futures::future::BoxFuture;
use http::HttpError;
use rmcp::{
    ServiceError, model::CallToolRequestParams, transport::streamable_http_client::StreamableHttpError,
};
use serde_json::Value;
use std::{
    fmt, io,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::sync::Mutex;

/// One MCP server. Dropping it terminates the process or the session.
pub struct McpServer {
    name: String,
    options: McpOptions,
    state: Mutex<State>,
}

enum State {
    Connected(Arc<Connection>),
    /// The server is not connected. After failures the next attempt waits until `next`.
    Away {
        failures: u32,
        next: Instant,
        why: String,
    },
}

impl McpServer {
    /// Creates a server without connecting to it.
    pub fn new(name: impl Into<String>, options: McpOptions) -> Self {
        let state = State::Away { failures: 0, next: Instant::now(), why: String::new() };
        McpServer { name: name.into(), options, state: Mutex::new(state) }
    }

    async fn connection(&self) -> Result<Arc<Connection>, ToolServerError> {
        let mut state = self.state.lock().await;
        let failures = match &*state {
            State::Connected(connection) if connection.is_open() => return Ok(connection.clone()),
            State::Connected(_) => {
                tracing::warn!(server = self.name, "the connection to an MCP server broke; reconnecting");
                0
            }
            State::Away { next, why, .. } if *next > Instant::now() => {
                let wait = next.duration_since(Instant::now()).as_millis();
                return Err(self.unavailable(format!("{why}; the next attempt is in {wait} ms")));
            }
            State::Away { failures, .. } => *failures,
        };
        match Connection::open(&self.name, &self.options).await {
            Ok(connection) => {
                let connection = Arc::new(connection);
                *state = State::Connected(connection.clone());
                Ok(connection)
            }
            Err(why) => {
                tracing::warn!(server = self.name, "an MCP server cannot be reached: {why}");
                let next = Instant::now() + backoff(failures);
                *state = State::Away { failures: failures.saturating_add(1), next, why: why.clone() };
                Err(self.unavailable(why))
            }
        }
    }

    /// Discards a failed connection, so that it is not used again.
    async fn give_up(&self, broken: &Arc<Connection>) {
        let mut state = self.state.lock().await;
        if matches!(&*state, State::Connected(connection) if Arc::ptr_eq(connection, broken)) {
            *state = State::Away { failures: 0, next: Instant::now(), why: String::new() };
        }
    }

    async fn served(&self) -> Result<Arc<[ServedTool]>, ToolServerError> {
        let connection = self.connection().await?;
        match connection.tools(&self.name, &self.options).await {
            Ok(tools) => Ok(tools),
            Err(why) => {
                self.give_up(&connection).await;
                Err(self.unavailable(format!("its tools cannot be listed: {why}")))
            }
        }
    }

    async fn call_once(&self, tool: &str, arguments: Value) -> Result<Value, ToolServerError> {
        let served = self.served().await?;
        let Some(described) = served.iter().find(|served| served.name == tool) else {
            return Err(self.unavailable(format!("it offers no tool {tool:?}")));
        };
        let connection = self.connection().await?;
        let Value::Object(arguments) = arguments else {
            return Err(ToolServerError::Failed("the arguments of a tool must be an object".to_owned()));
        };
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let timeout = self.options.bounds.call;
        let called = tokio::time::timeout(timeout, connection.peer().call_tool(params)).await;
        let Ok(called) = called else {
            let (name, limit) = (&self.name, timeout.as_millis());
            tracing::warn!(
                "{tool} did not answer within {limit} ms; increase timeout_ms under [mcp.{name}] in skep.toml"
            );
            return Err(ToolServerError::TimedOut(timeout));
        };
        match called {
            Ok(result) => outcome::value(result, described, self.options.bounds.result_bytes),
            Err(ServiceError::McpError(error)) => Err(ToolServerError::Failed(outcome::cut(&error.message))),
            Err(error) => {
                self.give_up(&connection).await;
                Err(match was_never_made(&error) {
                    true => self.unavailable(format!("{tool} cannot be called: {error}")),
                    false => ToolServerError::Interrupted(
                        self.because(&format!("the call of {tool} was interrupted: {error}")),
                    ),
                })
            }
        }
    }

    fn unavailable(&self, why: String) -> ToolServerError {
        ToolServerError::Unavailable(self.because(&why))
    }

    fn because(&self, why: &str) -> String {
        format!("MCP server {:?}: {}", self.name, outcome::cut(why))
    }
}

impl ToolServer for McpServer {
    fn tools(&self) -> BoxFuture<'_, Result<Arc<[ServedTool]>, ToolServerError>> {
        Box::pin(self.served())
    }

    fn call<'a>(&'a self, tool: &'a str, arguments: Value) -> BoxFuture<'a, Result<Value, ToolServerError>> {
        Box::pin(self.call_once(tool, arguments))
    }
}

impl fmt::Debug for McpServer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // The options contain secrets.
        f.debug_struct("McpServer").field("name", &self.name).finish_non_exhaustive()
    }
}

/// Returns whether a failed call certainly did not reach the tool. A connection that closes does not say whether the server
/// read the call before.
fn was_never_made(error: &ServiceError) -> bool {
    let ServiceError::TransportSend(error) = error else { return false };
    // A process reads a call once its whole line was written.
    if let Some(error) = error.error.downcast_ref::<io::Error>() {
        return matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::NotConnected);
    }
    match error.error.downcast_ref::<HttpError>() {
        Some(StreamableHttpError::Client(error)) => error.is_connect(),
        Some(StreamableHttpError::HttpStatus(error)) => matches!(error.status, 429 | 503),
        Some(
            StreamableHttpError::AuthRequired(_)
            | StreamableHttpError::InsufficientScope(_)
            | StreamableHttpError::SessionExpired,
        ) => true,
        _ => false,
    }
}

fn backoff(failures: u32) -> Duration {
    const LONGEST: Duration = Duration::from_secs(60);
    Duration::from_millis(500 << failures.min(10)).min(LONGEST)
}
