//! The origin of a request to a model.

use crate::{Origin, usage::Source};

/// Maximum number of characters of a model's name that is logged.
const MAX_ASKED: usize = 256;

/// The caller of a model, and the way by which the request came.
#[derive(Clone, Debug)]
pub struct RequestOrigin {
    pub(crate) source: Source,
    /// Id of the turn, for a request of an agent.
    pub(crate) turn: Option<String>,
    pub(crate) surface: Surface,
    /// The name by which the model was asked for, if it is not the model's own.
    pub(crate) asked: Option<String>,
    /// Whether a client reads the answer as it is made. For a request of an agent it is not known.
    pub(crate) streamed: Option<bool>,
}

/// The way by which a request came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Surface {
    ChatCompletions,
    Completions,
    Messages,
    Responses,
    AiRun,
    Batch,
    /// A message to an agent.
    Agent,
    /// A chat completion that an agent answers.
    AgentChat,
    /// An agent's own HTTP route.
    AgentRoute,
    Schedule,
    Event,
    /// A tool of an agent that an MCP client calls.
    Mcp,
    /// A tool of an agent that another agent calls.
    Tool,
}

impl RequestOrigin {
    /// Returns the origin of a request that names a model directly.
    pub fn of_client(tenant: &str, key: Option<&str>, surface: Surface) -> Self {
        let source = Source { tenant: tenant.to_owned(), key: key.map(str::to_owned), ..Source::default() };
        RequestOrigin { source, turn: None, surface, asked: None, streamed: None }
    }

    /// Sets the name by which the model was asked for.
    pub fn asking(self, asked: Option<&str>) -> Self {
        // A name may have any prefix, which is cut.
        let asked = asked.map(|name| name.chars().take(MAX_ASKED).collect());
        RequestOrigin { asked, ..self }
    }

    /// Sets whether the client reads the answer as it is made.
    pub fn streamed(self, streamed: bool) -> Self {
        RequestOrigin { streamed: Some(streamed), ..self }
    }
}

impl Surface {
    /// Returns the surface of an agent's turn with this cause.
    pub(crate) fn of(origin: &Origin) -> Self {
        match origin {
            Origin::Direct => Surface::Agent,
            Origin::Chat => Surface::AgentChat,
            Origin::Http(_) => Surface::AgentRoute,
            Origin::Alarm(_) => Surface::Schedule,
            Origin::Event(_) => Surface::Event,
            Origin::Tool(tool) if tool.callers.is_empty() => Surface::Mcp,
            Origin::Tool(_) => Surface::Tool,
        }
    }

    /// Returns the value that the log stores.
    pub fn as_str(self) -> &'static str {
        match self {
            Surface::ChatCompletions => "chat",
            Surface::Completions => "completions",
            Surface::Messages => "messages",
            Surface::Responses => "responses",
            Surface::AiRun => "ai-run",
            Surface::Batch => "batch",
            Surface::Agent => "agent",
            Surface::AgentChat => "agent-chat",
            Surface::AgentRoute => "agent-route",
            Surface::Schedule => "schedule",
            Surface::Event => "event",
            Surface::Mcp => "mcp",
            Surface::Tool => "tool",
        }
    }
}
