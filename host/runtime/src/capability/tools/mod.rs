//! `skep:agent/tools`: calls of external tools, and approvals of calls.

pub(crate) mod agents;
mod call;
mod catalog;
mod client;
mod fetch;
mod grant;

pub(crate) use call::{HostTools, TurnTools};

use crate::{
    Invocation, RuntimeError,
    agent::Agent,
    bindings::tools::{CallOptions, Host, HostWithStore, ToolError, ToolInfo},
    capability::{Capabilities, TurnContext, turn::Turn},
    feed::RunHandle,
    journal::{Identity, Stopped},
};
use std::{pin::Pin, sync::Arc};
use wasmtime::component::Accessor;

/// Finds the agents of this host.
pub(crate) trait Directory: Send + Sync {
    /// Returns the active version of an agent.
    fn agent(&self, name: &str) -> Result<Arc<Agent>, RuntimeError>;

    /// Returns the active versions of all agents that can be called, ordered by name.
    fn ready(&self) -> Vec<Arc<Agent>>;
}

/// A turn that is being accepted.
pub(crate) type Accepting = Pin<Box<dyn Future<Output = Result<RunHandle, RuntimeError>> + Send>>;

/// Runs turns of other agents.
pub(crate) trait Invoke: Send + Sync {
    /// Invokes an agent as the host does, with an internal idempotency key. The future must not hold the host longer than the
    /// turn takes to be accepted.
    fn invoke(self: Arc<Self>, invocation: Invocation) -> Accepting;
}

impl HostWithStore<TurnContext> for Capabilities {
    async fn list(accessor: &Accessor<TurnContext, Self>) -> wasmtime::Result<Vec<ToolInfo>> {
        let Some(turn) = begin(accessor, 0)? else { return Ok(Vec::new()) };
        let listed = call::list(&turn).await?;
        let size = |info: &ToolInfo| {
            info.description.len()
                + info.input_schema.len()
                + info.output_schema.as_ref().map_or(0, String::len)
        };
        accessor.with(|mut access| access.get().charge_result(listed.iter().map(size).sum()))?;
        Ok(listed)
    }

    async fn call(
        accessor: &Accessor<TurnContext, Self>,
        name: String,
        arguments: String,
        options: CallOptions,
    ) -> wasmtime::Result<Result<String, ToolError>> {
        let Some(turn) = begin(accessor, name.len() + arguments.len())? else {
            let message = "tools are available only in a turn, not while the agent describes itself";
            return Ok(Err(ToolError::Denied(message.to_owned())));
        };
        let result = call::call(&turn, &name, &arguments, &options).await?;
        accessor.with(|mut access| access.get().charge_result(result.as_ref().map_or(0, String::len)))?;
        Ok(result)
    }

    async fn approve(
        accessor: &Accessor<TurnContext, Self>,
        call_id: String,
    ) -> wasmtime::Result<Result<(), String>> {
        let Some(turn) = begin(accessor, call_id.len())? else { return Ok(Ok(())) };
        let made = accessor.with(|mut access| access.get().conversations.outstanding_call(&call_id));
        let Some((tool, arguments)) = made else {
            let id = crate::text::cut(&call_id, 80);
            return Ok(Err(format!(
                "no tool call {id:?} in this turn's conversations is waiting for a result"
            )));
        };
        if !turn.needs_approval(&tool) {
            return Ok(Ok(()));
        }
        Ok(approve(&turn, &call_id, &tool, &arguments).await?)
    }
}

/// Waits for a person's decision about a call that the guest's model made.
async fn approve(
    turn: &Arc<Turn>,
    call_id: &str,
    tool: &str,
    arguments: &str,
) -> Result<Result<(), String>, Stopped> {
    let identity = Identity::new("tools.approve", &(call_id, tool, arguments));
    let decided = turn.approvals.decision(identity, tool, arguments).await?;
    if decided.is_ok() {
        turn.approvals.approve(call_id, tool, arguments);
    }
    Ok(decided)
}

impl Host for TurnContext {}

/// Charges the call, and returns the calling turn. Returns `None` while the agent describes itself.
fn begin(
    accessor: &Accessor<TurnContext, Capabilities>,
    bytes: usize,
) -> wasmtime::Result<Option<Arc<Turn>>> {
    accessor.with(|mut access| {
        let context = access.get();
        context.charge(bytes)?;
        Ok(context.turn.clone())
    })
}
