//! What an agent and its tools can do during a turn.

use std::fmt::Display;
use std::rc::Rc;
use std::time::Duration;

use serde::Serialize;

use crate::host::{Host, Level};
use crate::tool::Tool;
use crate::{
    Completion, Conversation, EmitError, HostTools, Http, HttpError, ModelInfo, Random, Schedule, State,
};

/// The name of the conversation that [`Context::conversation`] opens.
const MAIN_CONVERSATION: &str = "main";

/// One turn of one session: its conversations, state and log.
pub struct Context {
    host: Rc<dyn Host>,
    tools: &'static [Tool],
    info: TurnInfo,
}

/// Which turn it is.
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
    pub(crate) fn new(host: Rc<dyn Host>, tools: &'static [Tool], info: TurnInfo) -> Self {
        Self { host, tools, info }
    }

    /// The session's main conversation. The host keeps it between turns, so append only what is new.
    pub fn conversation(&self) -> Conversation<'_> {
        self.conversation_named(MAIN_CONVERSATION)
    }

    /// The session's conversation of this name.
    pub fn conversation_named(&self, name: &str) -> Conversation<'_> {
        Conversation::open(self, name, None)
    }

    /// As [`conversation_named`](Self::conversation_named); if it does not exist yet it starts with this model.
    pub fn conversation_with_model(&self, name: &str, model: &str) -> Conversation<'_> {
        Conversation::open(self, name, Some(model))
    }

    /// Continues a text, without a conversation or a chat template.
    pub fn complete(&self, prompt: impl Into<String>) -> Completion<'_> {
        Completion::new(self, prompt.into())
    }

    /// The models that this agent may use.
    pub fn models(&self) -> Vec<ModelInfo> {
        self.host.models()
    }

    /// The session's durable state.
    pub fn state(&self) -> State<'_> {
        State { host: &*self.host }
    }

    /// What stands for a secret that `secrets` under `[grants]` in `agent.toml` names. The host puts the value in its place in
    /// headers, query and body of requests to the hosts that the secret is for, and the text back where an answer repeats it;
    /// the agent never has the value. In a test it is `secret.NAME.test`.
    pub fn secret(&self, name: &str) -> Result<String, HttpError> {
        self.host.secret(name)
    }

    /// Tools of other agents, of MCP servers and of the host, as far as they are granted.
    pub fn host_tools(&self) -> HostTools<'_> {
        HostTools { host: &*self.host, timeout_ms: None }
    }

    /// Waits. A turn that is run again does not wait again.
    pub async fn sleep(&self, duration: Duration) {
        self.host.sleep(u32::try_from(duration.as_millis()).unwrap_or(u32::MAX)).await;
    }

    /// HTTP requests to the hosts that the agent is granted.
    pub fn http(&self) -> Http<'_> {
        Http { host: &*self.host }
    }

    /// The session's schedules: what wakes it when nobody sends a message.
    pub fn schedule(&self) -> Schedule<'_> {
        Schedule { host: &*self.host, tries: None }
    }

    /// Tells of something under a topic such as `order.paid`, which agent.toml must grant: `events = ["order.*"]` under
    /// `[grants]`. Agents that have a trigger for it, and webhooks, get it once the turn is committed; a turn that fails
    /// tells nothing.
    pub fn emit<T: Serialize + ?Sized>(&self, topic: &str, data: &T) -> Result<(), EmitError> {
        let data = serde_json::to_value(data);
        let data = data.map_err(|error| EmitError::InvalidArgument(format!("the data: {error}")))?;
        self.host.emit(topic, Some(data).filter(|data| !data.is_null()))
    }

    /// Random numbers. agent.toml must grant them: `random = true` under `[grants]`. A turn that is run again draws the same.
    pub fn random(&self) -> Random<'_> {
        Random {
            #[cfg(not(target_arch = "wasm32"))]
            host: &*self.host,
            #[cfg(target_arch = "wasm32")]
            turn: std::marker::PhantomData,
        }
    }

    /// The agent's log, which `skep logs` shows.
    pub fn log(&self) -> Log<'_> {
        Log { host: &*self.host }
    }

    /// The session's id.
    pub fn session(&self) -> &str {
        &self.info.session
    }

    /// 1 for the session's first turn.
    pub fn turn(&self) -> u64 {
        self.info.turn
    }

    /// The turn's time in milliseconds since 1970-01-01 UTC: when its message came. It stands still during the turn, so
    /// that a turn which is run again sees the same time.
    pub fn now_ms(&self) -> u64 {
        self.info.received_at_ms
    }

    pub(crate) fn host(&self) -> &dyn Host {
        &*self.host
    }

    pub(crate) fn tools(&self) -> &'static [Tool] {
        self.tools
    }
}

/// The agent's log. The host bounds the length of a line and their number in a turn.
#[derive(Clone, Copy)]
pub struct Log<'a> {
    host: &'a dyn Host,
}

impl Log<'_> {
    /// For the author.
    pub fn debug(&self, message: impl Display) {
        self.host.log(Level::Debug, &message.to_string());
    }

    /// What happened.
    pub fn info(&self, message: impl Display) {
        self.host.log(Level::Info, &message.to_string());
    }

    /// What may need attention.
    pub fn warn(&self, message: impl Display) {
        self.host.log(Level::Warn, &message.to_string());
    }

    /// What went wrong.
    pub fn error(&self, message: impl Display) {
        self.host.log(Level::Error, &message.to_string());
    }
}
