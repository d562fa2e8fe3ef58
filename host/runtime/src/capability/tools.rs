//! `skep:agent/tools`: calls of tools that are not the agent's own.

use super::{Capabilities, TurnContext, budget::Turn};
use crate::{
    bindings::tools::{CallOptions, Host, HostWithStore, ToolError, ToolInfo},
    host_tools,
};
use std::sync::Arc;
use wasmtime::component::Accessor;

impl HostWithStore<TurnContext> for Capabilities {
    async fn list(accessor: &Accessor<TurnContext, Self>) -> wasmtime::Result<Vec<ToolInfo>> {
        let Some(turn) = begin(accessor, 0)? else { return Ok(Vec::new()) };
        let listed = host_tools::list(&turn).await?;
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
            let message = "tools are there in a turn only, not while the agent is described";
            return Ok(Err(ToolError::Denied(message.to_owned())));
        };
        let result = host_tools::call(&turn, &name, &arguments, &options).await?;
        accessor.with(|mut access| access.get().charge_result(result.as_ref().map_or(0, String::len)))?;
        Ok(result)
    }
}

impl Host for TurnContext {}

/// The turn that calls.
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
