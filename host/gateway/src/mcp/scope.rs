//! The part of the host that a connection sees: all agents at `/mcp`, one agent at `/mcp/{agent}`.

use super::catalog::Target;
use crate::caller::Caller;
use axum::http::request::Parts;
use rmcp::{ErrorData, RoleServer, service::RequestContext};
use skep_runtime::AgentHost;

/// The agent in the path of a request, stored in the request's extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PathAgent(pub(super) String);

/// The caller of a request, and the agents that the request is about.
pub(super) struct Scope {
    pub(super) caller: Caller,
    /// The agent in the path. `None` means all agents.
    pub(super) agent: Option<String>,
}

impl Scope {
    /// Returns the scope of the HTTP request that a message was received in.
    pub(super) fn of(context: &RequestContext<RoleServer>) -> Result<Self, ErrorData> {
        let parts = context.extensions.get::<Parts>();
        let caller = parts.and_then(|parts| parts.extensions.get::<Caller>()).cloned();
        let caller =
            caller.ok_or_else(|| ErrorData::internal_error("the request was not authenticated", None))?;
        let agent = parts.and_then(|parts| parts.extensions.get::<PathAgent>());
        Ok(Scope { caller, agent: agent.map(|agent| agent.0.clone()) })
    }

    /// Returns whether the request may concern an agent.
    pub(super) fn includes(&self, agent: &str) -> bool {
        self.caller.reaches(agent) && self.agent.as_ref().is_none_or(|own| own == agent)
    }

    /// Returns the names of the agents that the request may concern, in order.
    pub(super) fn agents(&self, host: &AgentHost) -> Vec<String> {
        let names = host.agents().into_iter().map(|agent| agent.name);
        names.filter(|name| self.includes(name)).collect()
    }

    /// Returns the agent, and the agent's tool or prompt, that a name means.
    pub(super) fn target<'a>(&'a self, name: &'a str) -> Target<'a> {
        match &self.agent {
            Some(agent) => Target { agent, tool: Some(name) },
            None => Target::of(name),
        }
    }

    /// Returns the name under which clients know an agent's tool or prompt.
    pub(super) fn name(&self, agent: &str, own: &str) -> String {
        match &self.agent {
            Some(_) => own.to_owned(),
            None => Target::name(agent, own),
        }
    }
}
