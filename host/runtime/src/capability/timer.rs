//! `skep:agent/timer`: sleeping. The end of each sleep, and its order among other results, is in the journal.

use crate::{
    bindings::timer::{Host, HostWithStore},
    capability::{Capabilities, TurnContext},
    journal::Identity,
};
use std::time::Duration;
use wasmtime::component::Accessor;

impl HostWithStore<TurnContext> for Capabilities {
    async fn sleep(accessor: &Accessor<TurnContext, Self>, ms: u32) -> wasmtime::Result<()> {
        let turn = accessor.with(|mut access| {
            let context = access.get();
            context.charge(0)?;
            wasmtime::error::Ok(context.turn.clone())
        })?;
        // While an agent describes itself nothing is journaled, and its deadline bounds the wait.
        let Some(turn) = turn else {
            tokio::time::sleep(Duration::from_millis(ms.into())).await;
            return Ok(());
        };
        let mut call = turn.journal.begin(Identity::new("sleep", &ms)).await?;
        if let Some(((), position)) = turn.journal.recorded(&mut call)? {
            position.reached().await;
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(ms.into())).await;
        turn.journal.caught_up().await;
        turn.journal.ended(&call, &(), Vec::new());
        Ok(())
    }
}

impl Host for TurnContext {}
