//! Access to everything that an agent and its tools can use during a turn.
//!
//! The methods that open conversations and completions are beside those types, which know the context.

mod tool;

use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;

use crate::client::Client;
use crate::error::{EmitError, HttpError};
use crate::generation::ModelInfo;
use crate::host::{Host, Level};
use crate::host_tools::HostTools;
use crate::http::Http;
use crate::random::Random;
use crate::schedule::Schedule;
use crate::state::State;
pub use tool::{Tool, ToolFunction};

/// One turn of one session, with its conversations, state and log.
pub struct Context {
    host: Rc<dyn Host>,
    tools: &'static [Tool],
    /// The model of `#[agent(model = …)]`.
    model: Option<&'static str>,
    info: TurnInfo,
}

/// Identity of the turn.
pub(crate) struct TurnInfo {
    session: String,
    turn: u64,
    received_at_ms: u64,
}

impl TurnInfo {
    pub(crate) fn new(session: &str, turn: u64, received_at_ms: u64) -> Self {
        Self { session: session.to_owned(), turn, received_at_ms }
    }
}

impl Context {
    pub(crate) fn new(
        host: Rc<dyn Host>,
        tools: &'static [Tool],
        model: Option<&'static str>,
        info: TurnInfo,
    ) -> Self {
        Self { host, tools, model, info }
    }

    /// Returns the models that this agent may use.
    pub fn models(&self) -> Vec<ModelInfo> {
        self.host.models()
    }

    /// Returns the session's durable state.
    pub fn state(&self) -> State<'_> {
        State { host: &*self.host }
    }

    /// Returns a placeholder for a secret that `secrets` under `[grants]` in `agent.toml` names. The host
    /// replaces it with the value in the headers, query and body of requests to the hosts that the secret is
    /// for, and replaces the value with the placeholder where a response repeats it. The agent never sees the
    /// value. In a test the placeholder is `secret.NAME.test`.
    pub fn secret(&self, name: &str) -> Result<String, HttpError> {
        self.host.secret(name)
    }

    /// Returns the granted tools of other agents, of MCP servers and of the host.
    pub fn host_tools(&self) -> HostTools<'_> {
        HostTools { host: &*self.host, timeout_ms: None }
    }

    /// Returns the client that waits for the turn. Only the caller of a tool over MCP can be asked things.
    pub fn client(&self) -> Client<'_> {
        Client { host: &*self.host }
    }

    /// Waits for a duration. A turn that runs again does not wait again.
    pub async fn sleep(&self, duration: Duration) {
        self.host.sleep(u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)).await;
    }

    /// Returns a client for HTTP requests to the hosts that the agent is granted.
    pub fn http(&self) -> Http<'_> {
        Http { host: &*self.host }
    }

    /// Returns the session's schedules, which wake it without a message.
    pub fn schedule(&self) -> Schedule<'_> {
        Schedule { host: &*self.host, tries: None }
    }

    /// Emits an event under a topic such as `order.paid`. `agent.toml` must grant the topic, for example with
    /// `events = ["order.*"]` under `[grants]`. Agents that have a trigger for the topic, and webhooks,
    /// receive the event once the turn is committed. A turn that fails emits nothing.
    pub fn emit<T: Serialize + ?Sized>(&self, topic: &str, data: &T) -> Result<(), EmitError> {
        let data = serde_json::to_value(data);
        let data = data.map_err(|error| EmitError::InvalidArgument(format!("the data: {error}")))?;
        self.host.emit(topic, Some(data).filter(|data| !data.is_null()))
    }

    /// Returns a source of random numbers. `agent.toml` must grant it with `random = true` under `[grants]`.
    /// A turn that runs again draws the same numbers.
    pub fn random(&self) -> Random<'_> {
        Random {
            #[cfg(not(target_arch = "wasm32"))]
            host: &*self.host,
            #[cfg(target_arch = "wasm32")]
            turn: std::marker::PhantomData,
        }
    }

    /// Returns the agent's log, which `skep logs` shows.
    pub fn log(&self) -> Log<'_> {
        Log { host: &*self.host }
    }

    /// Returns the session's id.
    pub fn session(&self) -> &str {
        &self.info.session
    }

    /// Returns the number of the turn: 1 for the session's first turn.
    pub fn turn(&self) -> u64 {
        self.info.turn
    }

    /// Returns the turn's time in milliseconds since 1970-01-01 UTC: the time at which its message arrived.
    /// It does not advance during the turn, so that a turn that runs again sees the same time.
    pub fn now_ms(&self) -> u64 {
        self.info.received_at_ms
    }

    pub(crate) fn host(&self) -> &dyn Host {
        &*self.host
    }

    pub(crate) fn tools(&self) -> &'static [Tool] {
        self.tools
    }

    /// Returns the model of `#[agent(model = …)]`.
    pub(crate) fn model(&self) -> Option<&'static str> {
        self.model
    }
}

/// The agent's log. The host limits the length of a line and the number of lines per turn.
#[derive(Clone, Copy)]
pub struct Log<'a> {
    host: &'a dyn Host,
}

impl Log<'_> {
    /// Logs a message for the author of the agent.
    pub fn debug(&self, message: impl Display) {
        self.host.log(Level::Debug, &message.to_string());
    }

    /// Logs a normal event.
    pub fn info(&self, message: impl Display) {
        self.host.log(Level::Info, &message.to_string());
    }

    /// Logs something that may need attention.
    pub fn warn(&self, message: impl Display) {
        self.host.log(Level::Warn, &message.to_string());
    }

    /// Logs an error.
    pub fn error(&self, message: impl Display) {
        self.host.log(Level::Error, &message.to_string());
    }
}
