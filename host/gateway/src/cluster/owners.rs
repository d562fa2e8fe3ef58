//! The interface through which `proxy` learns who owns a session and which hosts are alive: the runtime, or in tests a script.

use futures::future::BoxFuture;
use skep_runtime::{AgentHost, RuntimeError, SessionPlace, WorkingHost};
use std::collections::HashSet;

/// The thing that a request is about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Subject {
    Session {
        agent: String,
        session: String,
    },
    Approval(String),
    /// A session of an MCP client, which this host does not have.
    McpSession(String),
}

pub(crate) trait Owners: Send + Sync + 'static {
    /// Returns where requests about a subject go.
    fn place<'a>(&'a self, subject: &'a Subject) -> BoxFuture<'a, Result<SessionPlace, RuntimeError>>;
    /// Returns the numbers of the hosts that are alive.
    fn live(&self) -> BoxFuture<'_, Result<HashSet<i64>, RuntimeError>>;
    /// Returns the other hosts that answer clients, and the work that they have.
    fn working(&self) -> Vec<WorkingHost>;
}

impl Owners for AgentHost {
    fn place<'a>(&'a self, subject: &'a Subject) -> BoxFuture<'a, Result<SessionPlace, RuntimeError>> {
        Box::pin(async move {
            match subject {
                Subject::Session { agent, session } => self.place_of(agent, session).await,
                Subject::Approval(id) => self.place_of_approval(id).await,
                Subject::McpSession(id) => self.place_of_mcp_session(id).await,
            }
        })
    }

    fn live(&self) -> BoxFuture<'_, Result<HashSet<i64>, RuntimeError>> {
        Box::pin(self.live_hosts())
    }

    fn working(&self) -> Vec<WorkingHost> {
        self.other_hosts().with_agents()
    }
}
